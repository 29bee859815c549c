"""What a worker asks of its device, and the CPU's answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from steptime.host_memory import staging
from steptime.syncs.scopes import DEVICE, EVENT, note_wait


class CpuEvent:
    """Stands for an event on a device that finishes each operation before it returns."""

    __slots__ = ()

    def record(self, stream: object = None) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        note_wait(EVENT)


class Device:
    """A worker's device and its streams. Owned by one worker thread; `with device.active():` is its whole
    life.

    Args:
        name: `cpu`, `cpu:N`, `cuda`, `cuda:N` or `sim:N`; says which kind is made.

    Attributes:
        torch: what tensors are made on. Workers on `cpu:1` and `cpu:2` share the CPU's memory.
        index: N, 0 when not given.
        stream: the one on which its worker runs, made at the first `active()` and kept; None on the CPU.
        asynchronous: work is enqueued on streams, and events say when it is done.
    """

    is_cuda = False
    asynchronous = False

    def __new__(cls, name: str) -> Device:
        kind = name.partition(":")[0]
        if kind == "cuda":
            from dflash.device.cuda import CudaDevice

            return super().__new__(CudaDevice)
        if kind == "sim":
            from dflash.device.simulated import SimulatedDevice

            return super().__new__(SimulatedDevice)
        return super().__new__(cls)

    def __init__(self, name: str) -> None:
        self.name = name
        self.index = int(name.partition(":")[2] or 0)
        self.torch = torch.device("cpu")
        self.stream: Any = None
        self._away: dict[tuple[str, int], tuple[Device, Any]] = {}

    def copies_from(self, others: Iterable[Device]) -> None:
        """Give this worker a stream of its own on each device that it copies from; before its thread starts.

        A copy between devices runs on the source's current stream of the calling thread. Without one of its
        own all workers' copies from one device would queue up on that device's default stream.
        """
        for other in others:
            if not self.shares_memory(other) and other.asynchronous:
                self._away.setdefault((type(other).__name__, other.index), (other, other.new_stream()))

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make this the thread's device and run on its stream."""
        if not self.asynchronous:
            yield
            return
        if self.stream is None:
            self.stream = self.new_stream()
        with contextlib.ExitStack() as stack:
            for other, stream in self._away.values():
                stack.enter_context(other.on(stream))
            stack.enter_context(self.on(self.stream))
            yield

    def new_stream(self) -> Any:
        """Another stream of this device; make them before the steady state."""
        return None

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Run on a stream that `new_stream` made."""
        return contextlib.nullcontext()

    def event(self, timing: bool = False) -> Any:
        """A new event; make them before the steady state and re-record them. It belongs to the device of its
        first record."""
        return CpuEvent()

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that this device copies from and to without a wait."""
        return staging(tuple(shape), dtype, pin=True)

    def synchronize(self) -> None:
        """Wait for all work. Only at the ends of a run and of a measured segment, inside `allowed_sync`."""
        note_wait(DEVICE)

    def shares_memory(self, other: Device) -> bool:
        """Whether what is on `other` can be read here without a copy."""
        return self.torch == other.torch

    def reaches(self, other: Device) -> bool:
        """Whether this device copies from `other` without the host's memory in between."""
        return self.shares_memory(other)
