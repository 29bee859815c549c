"""Way: the function and dispatch modes of the trainer's own scopes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

from steptime.counting.difference import Counts
from steptime.syncs.counting import CountingScopes, PlainDevice
from steptime.syncs.scopes import Scope


class ModesWay:
    """Counts with `CountingScopes`; on the CPU its device is a simulated one.

    Args:
        device: name of the device that the counted threads work on.
    """

    name = "modes"
    sees = (
        "every operator of the thread and of its backward that would wait on a GPU, the Python reads that "
        "dispatch nothing (tolist, numpy, cpu, print), blocking and pageable copies, synchronize calls from "
        "Python; kernels, copies, allocations; compiled graphs as one operation each, compiles, compiled "
        "functions that ran eager"
    )
    does_not_see = (
        "waits inside C++ (the allocator, other libraries); kernels, copies and allocations inside a "
        "compiled graph; numpy() and the like inside torch's own Python and compiled functions; names "
        "imported before it was armed"
    )
    every_step = True
    claims = frozenset(
        {
            "item",
            "device_sync",
            "event_sync",
            "pageable_copy",
            "mask_read",
            "empty_cache",
            "extra_kernel",
            "device_alloc",
            "compile",
            "backward_sync",
            "monitor_sync",
            "flush_sync",
        }
    )

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.scopes = CountingScopes(cuda=device.startswith("cuda"))

    def available(self) -> str | None:
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            return "no CUDA device"
        return None

    def arm(self, role: str) -> AbstractContextManager[Scope]:
        return self._armed(role)

    @contextlib.contextmanager
    def _armed(self, role: str) -> Iterator[Scope]:
        device = None if role in ("monitor", "prefetcher") else PlainDevice(self.device)
        with self.scopes.enter(role, device) as scope:
            self.scopes.arm()
            yield scope

    def counts(self) -> Counts:
        return self.scopes.counts()
