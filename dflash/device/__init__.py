"""The few lines that differ between CUDA and the CPU, so that the pipeline has one code path.

On the CPU every operation is done when it returns: events are always complete and streams are no-ops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from steptime.errors import UserError
from steptime.host_memory import staging
from steptime.syncs.scopes import DEVICE, EVENT, note_wait


class _CpuEvent:
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
    """A worker's device and its stream. Owned by one worker thread; `with device.active():` is its whole
    life."""

    asynchronous = False

    def __new__(cls, name: str) -> Device:
        if name.startswith("sim"):
            from dflash.device.simulated import SimulatedDevice

            return super().__new__(SimulatedDevice)
        return super().__new__(cls)

    def __init__(self, name: str) -> None:
        kind, _, index = name.partition(":")
        self.name = name
        self.is_cuda = kind == "cuda"
        # `cpu:3` is a simulated GPU: its own worker, the same memory.
        self.torch = torch.device("cuda", int(index or 0)) if self.is_cuda else torch.device("cpu")
        self.stream: Any = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make this the thread's device and run on a stream of its own."""
        if not self.is_cuda:
            yield
            return
        torch.cuda.set_device(self.torch)
        self.stream = torch.cuda.Stream(self.torch)
        with torch.cuda.stream(self.stream):
            yield

    def event(self, timing: bool = False) -> Any:
        """A new event; make them before the steady state and re-record them."""
        return torch.cuda.Event(enable_timing=timing) if self.is_cuda else _CpuEvent()

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that this device copies from and to without a wait."""
        return staging(tuple(shape), dtype, pin=True)

    def synchronize(self) -> None:
        """Wait for all work. Only at the ends of a run and of a measured segment, inside `allowed_sync`."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch)
        else:
            note_wait(DEVICE)


def torch_dtype(name: str) -> torch.dtype:
    """`float32` or `bfloat16` as torch's type."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def check_devices(names: Sequence[str]) -> None:
    """Refuse a CUDA device that this machine lacks.

    Raises:
        UserError: naming the device and what is there.
    """
    for name in names:
        if not name.startswith("cuda"):
            continue
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(name.partition(":")[2] or 0) >= count:
            raise UserError(
                f"device {name!r}: this machine has {count} CUDA devices; try --set "
                "target.devices='[\"cpu\"]'"
            )
