"""Looks at the GPUs between two segments: throttling and foreign processes come and go, and an idle GPU hides
both."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from bench.machine import state
from bench.records.types import GpuState

EVERY_S = 10.0
"""A look costs some ms, in which nothing is timed."""


def read_gpus() -> Sequence[GpuState]:
    """The state of every GPU; processes that descend from this one are not foreign."""
    return state.read_gpus(state.process_tree())


class GpuWatch:
    """What was seen of the GPUs under load.

    Args:
        read, clock: stand-ins, for tests.

    Attributes:
        seen: states of all looks, in order; `state.with_seen` lays them into the state after the run.
    """

    def __init__(
        self, read: Callable[[], Sequence[GpuState]] = read_gpus, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read, self._clock = read, clock
        self._next_s = -float("inf")
        self.seen: list[GpuState] = []

    def look(self, *, now: bool = False) -> None:
        """Between two segments; only every EVERY_S seconds unless `now`. Without a GPU it looks once."""
        at_s = self._clock()
        if at_s < self._next_s and not now:
            return
        found = self._read()
        self.seen += found
        self._next_s = at_s + EVERY_S if found else float("inf")
