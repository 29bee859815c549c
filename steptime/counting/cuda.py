"""All CUDA ways at once, around the workers of a trainer: modes, GPU trace, copy wrappers, allocator
counters.

Each sees what the others cannot; what they count stands side by side, with the way's name behind the kind.
The modes say what the program asked for, the trace what PyTorch waited for: one `.item()` is one of each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Literal

from steptime.counting.ways import gpu_trace
from steptime.counting.ways.allocator import DEVICE_KEYS, HOST_KEYS, AllocatorWay
from steptime.counting.ways.copies import GAPPED, PAGEABLE, CopiesWay
from steptime.counting.ways.gpu_trace import BLOCK, CREATION, RECORD, GpuTraceWay
from steptime.syncs.counting import CountingScopes, WorkerDevice
from steptime.syncs.scopes import (
    ALLOCATION,
    BYTES_TO_DEVICE,
    BYTES_TO_HOST,
    COPY_TO_DEVICE,
    COPY_TO_HOST,
    OPERATION,
    Key,
    Scope,
)

Category = Literal["sync", "operation", "allocation", "copy", "bytes", "driver", "event"]

_WORK: dict[str, Category] = {
    OPERATION: "operation",
    ALLOCATION: "allocation",
    COPY_TO_DEVICE: "copy",
    COPY_TO_HOST: "copy",
    BYTES_TO_DEVICE: "bytes",
    BYTES_TO_HOST: "bytes",
}
_TOLD: dict[str, Category] = {
    **dict.fromkeys(gpu_trace.SYNCS, "sync"),
    **dict.fromkeys((PAGEABLE, GAPPED), "sync"),
    BLOCK: "allocation",
    CREATION: "event",
    RECORD: "event",
    **dict.fromkeys((*DEVICE_KEYS.values(), *HOST_KEYS.values()), "driver"),
}
"""Every kind that the trace, the copy wrappers and the allocator's counters tell. Memory that the driver is
asked for depends on the timing of other threads, so it is no sync of the thread that happened to ask."""
FREE = frozenset({RECORD})
"""Kinds that are not kept: recording an event never waits, and event pairs are what `profile` is made of."""


def category(kind: str) -> Category:
    """What a kind counts as. One with its way's name behind it must be known; of the modes' kinds, those that
    are no work are syncs, since they name the operator that waits.

    Raises:
        ValueError: a way tells of a kind that nobody has put into a category: it is not zero.
    """
    name, _, way = kind.partition(" [")
    if name in _WORK:
        return _WORK[name]
    if name in _TOLD:
        return _TOLD[name]
    if way:
        raise ValueError(f"kind {kind!r}: not known whether it is a host sync")
    return "sync"


def is_sync(kind: str) -> bool:
    """Whether a kind, with or without its way's name, is a host sync."""
    return category(kind) == "sync"


def plain(kind: str) -> str:
    """A kind without the name of its way."""
    return kind.partition(" [")[0]


class CudaScopes(CountingScopes):
    """`CountingScopes` with the CUDA ways beside it. Only in a process made for counting: the trace cannot be
    turned off.

    A way that cannot be armed is named in `unavailable`, and the counts then prove nothing.
    """

    def __init__(self) -> None:
        super().__init__(cuda=True)
        self._trace, self._copies, self._allocator = GpuTraceWay(), CopiesWay(), AllocatorWay()
        self._all = (self._trace, self._copies, self._allocator)
        reasons = {way.name: way.available() for way in self._all}
        self.unavailable = tuple(
            f"{name}: {reason}" for name, reason in reasons.items() if reason is not None
        )
        self.ways = tuple(name for name, reason in reasons.items() if reason is None)
        if not self.unavailable:
            self._trace.attach()

    def enter(self, role: str, device: WorkerDevice | None = None) -> AbstractContextManager[Scope]:
        return self._entered(role, device)

    @contextlib.contextmanager
    def _entered(self, role: str, device: WorkerDevice | None) -> Iterator[Scope]:
        with contextlib.ExitStack() as stack:
            scope = stack.enter_context(super().enter(role, device))
            if not self.unavailable:
                stack.enter_context(self._copies.wrapped())
                stack.enter_context(self._allocator.watching())
            yield scope

    def events(self) -> dict[Key, int]:
        """Everything that was counted, by any way."""
        found = self.ledger.counts.copy()
        for way in self._all:
            for key, n in way.notes.counts.copy().items():
                if key.kind not in FREE:
                    found[key._replace(kind=f"{key.kind} [{way.name}]")] = n
        return found
