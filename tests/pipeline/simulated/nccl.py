"""A stand-in for NCCL on simulated devices: collectives on a stream of their own, no wait on the host for a
device, and every read and write of a rank's tensor seen by the race detector."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dflash.device import Device


class Ring:
    """What the ranks of one group share.

    Args:
        devices: each rank's.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = devices
        self.barrier = threading.Barrier(len(devices))
        self.tensors: list[Any] = [None] * len(devices)
        self.ready: list[Any] = [None] * len(devices)
        self.read: list[Any] = [None] * len(devices)


class Work:
    """As `torch.distributed.Work` of NCCL: `wait` lets the current stream wait."""

    def __init__(self, done: Any) -> None:
        self._done = done

    def wait(self) -> None:
        self._done.wait()


class Group:
    """One rank's side of a ring, used from its drafter's thread."""

    def __init__(self, ring: Ring, rank: int) -> None:
        self._ring, self._rank, self._device = ring, rank, ring.devices[rank]
        self._stream = self._device.new_stream()
        self._away = [(one, one.new_stream()) for one in ring.devices if one is not self._device]

    def allreduce(self, tensors: Sequence[torch.Tensor]) -> Work:
        def summed(parts: list[torch.Tensor]) -> torch.Tensor:
            total = parts[0].clone()
            for part in parts[1:]:
                total.add_(part)
            return total

        return self._collective(tensors[0], summed)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> Work:
        return self._collective(tensors[0], lambda parts: parts[0])

    def _collective(self, tensor: torch.Tensor, join: Callable[[list[torch.Tensor]], torch.Tensor]) -> Work:
        ring, rank, device = self._ring, self._rank, self._device
        begun = device.event()
        begun.record()
        with self._streams():
            begun.wait()
            ring.tensors[rank], ring.ready[rank] = tensor, self._recorded()
            ring.barrier.wait()
            for ready in ring.ready:
                ready.wait()
            joined = join([part.to(device.torch, non_blocking=True) for part in ring.tensors])
            ring.read[rank] = self._recorded()
            ring.barrier.wait()
            for read in ring.read:
                read.wait()
            tensor.copy_(joined, non_blocking=True)
            done = self._recorded()
        return Work(done)

    def _recorded(self) -> Any:
        event = self._device.event()
        event.record()
        return event

    @contextlib.contextmanager
    def _streams(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for other, stream in self._away:
                stack.enter_context(other.on(stream))
            stack.enter_context(self._device.on(self._stream))
            yield
