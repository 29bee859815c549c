"""Looks at the GPUs between two segments: throttling and foreign processes come and go, and an idle GPU hides
both."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from steptime.machine import state
from steptime.records.types import GpuState

EVERY_S = 10.0
"""A look costs some ms, in which nothing is timed."""


class GpuWatch:
    """What was seen of the GPUs under load.

    Args:
        devices: those in use, such as `cuda:1`; None: every visible GPU.
        read, clock: stand-ins, for tests.

    Attributes:
        seen: states of all looks, in order; `state.with_seen` lays them into the state after the run.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        *,
        read: Callable[[], Sequence[GpuState]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._devices, self._clock = devices, clock
        self._read = read or self._read_gpus
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

    def _read_gpus(self) -> Sequence[GpuState]:
        return state.read_gpus(state.process_tree(), self._devices)
