"""The smallest protocol: what a file in the user's repository gives.

from steptime import Periodic, Steps

def make():
    ...
    return Steps(step, cycle=4, tokens=512, switches={"norms": log.enable_norms})"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Switch = Callable[[bool], object]


@dataclass(frozen=True)
class Periodic:
    """A switch of something that acts every so many steps: a logger, a writer of histograms.

    Attributes:
        switch: turns it on and off; None: nothing but `act` costs something.
        every: steps between two of its actions.
        act: does the action once, now. The harness calls it, so `step` itself must not.
    """

    every: int
    act: Callable[[], object]
    switch: Switch | None = None


@dataclass
class Steps:
    """A trainer.

    Attributes:
        step: trains on batch i of the cycle. It returns the loss (a number, or a tensor of one, which is read
            between measurements alone) or None.
        cycle: batches that are replayed, one for each step.
        tokens: units of work in a batch (tokens, samples); one number, or one for each batch.
        switches: what may be on or off, by name; everything is off at first.
        warmup: steps before anything is measured, at least the cycle.
        devices: that it works on; None: the current CUDA device, or the CPU where there is none.
        accounted: seconds that each switch has spent so far by its own clock.
        hold: rate and decay of every optimizer are 0 while it steps, and the random numbers of each batch are
            the same, so that losses repeat and two halves of a pair do equal work.
        tick: called before what acts every so many steps does so, whichever of it is on: work that all of it
            shares.
        close: called at the end.
        notes: told in the report.
    """

    step: Callable[[int], Any]
    cycle: int = 4
    tokens: int | Sequence[int] = 1
    switches: Mapping[str, Switch | Periodic] = field(default_factory=dict)
    warmup: int = 0
    devices: Sequence[str] | None = None
    accounted: Callable[[], Mapping[str, float]] | None = None
    hold: bool = True
    tick: Callable[[], object] | None = None
    close: Callable[[], object] | None = None
    notes: Sequence[str] = ()

    def run(self, batch: Callable[[], int], boundary: Callable[[Any], bool]) -> None:
        """Step until `boundary`, which gets the loss, says that it is enough."""
        while boundary(self.step(batch())):
            pass
