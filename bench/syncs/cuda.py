"""All CUDA ways at once, around the workers of a trainer: modes, GPU trace, copy wrappers, allocator
counters.

Each sees what the others cannot; what they count stands side by side, with the way's name behind the kind.
The modes say what the program asked for, the trace what PyTorch waited for: one `.item()` is one of each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

from bench.syncs.ways.allocator import AllocatorWay
from bench.syncs.ways.copies import CopiesWay
from bench.syncs.ways.gpu_trace import BLOCK, CREATION, RECORD, GpuTraceWay
from steptime.syncs.counting import CountingScopes, WorkerDevice
from steptime.syncs.scopes import WORK, Key, Scope

FREE = frozenset({RECORD})
"""Kinds that cost nothing worth a gate: recording an event never waits, and event pairs are what `profile` is
made of."""
DEVICE_WORK = WORK | {BLOCK, CREATION}


def is_sync(kind: str) -> bool:
    """Whether a kind, with or without its way's name, is a host sync."""
    return plain(kind) not in DEVICE_WORK | FREE


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
