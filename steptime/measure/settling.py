"""How long a segment in the path must be: the pilot.

Every segment begins at a standstill. On a GPU the host has not run ahead of its device yet, so a wait for the
device, in a short segment, costs less than it will in training. The pilot takes pairs of segments with and
without such a wait, 1, 2, 4, ... steps long, and finds the shortest at which its cost is what it is in longer
ones. On the CPU no host runs ahead, and one step does at once."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from statistics import fmean, stdev
from typing import Final

from steptime.records.pairs import Request, Segment

LENGTHS: Final = (1, 2, 4, 8, 16, 32)
NEAR: Final = 0.1
"""Costs are alike that differ by no more than this share of the longer segments'..."""
FLOOR: Final = 0.002
"""... or by no more than this share of the time."""
SURE: Final = 1.645
"""Standard errors on top of a difference: at one-sided 5% it is no larger."""
LEAST_PAIRS: Final = 3


@dataclass(frozen=True, slots=True)
class LengthCost:
    """What the wait cost in segments of one length.

    Attributes:
        steps: of a segment.
        cost: mean of ln(seconds with, over seconds without).
        error: its standard error; infinite for fewer than `LEAST_PAIRS` pairs.
    """

    steps: int
    cost: float
    error: float
    pairs: int


@dataclass(frozen=True, slots=True)
class Settled:
    """The pilot's answer.

    Attributes:
        steps: fewest steps of a segment.
        settled: whether a longer one was shown to cost the same.
        why: in one line.
    """

    steps: int
    settled: bool
    why: str
    costs: tuple[LengthCost, ...] = ()


def shortest_settled(costs: Sequence[LengthCost]) -> Settled:
    """The shortest length whose cost is shown to be that of every longer one; the longest where none is.

    Shown, and not merely not refuted: a pilot with much noise and few pairs must not end at one step.

    Raises:
        ValueError: no length.
    """
    if not costs:
        raise ValueError("a pilot of no length")
    costs = tuple(sorted(costs, key=lambda one: one.steps))
    for at, one in enumerate(costs[:-1]):
        longer = costs[at + 1 :]
        if all(_alike(one, other) for other in longer):
            last = longer[-1]
            why = f"a wait costs {one.cost:.2%} at {one.steps} steps and {last.cost:.2%} at {last.steps}"
            return Settled(one.steps, True, why, costs)
    last = costs[-1]
    why = f"a wait's cost has not settled below {last.steps} steps ({last.cost:.2%} +- {last.error:.2%})"
    return Settled(last.steps, False, why, costs)


def _alike(one: LengthCost, longer: LengthCost) -> bool:
    sure = SURE * math.hypot(one.error, longer.error)
    return abs(longer.cost - one.cost) + sure <= max(FLOOR, NEAR * abs(longer.cost))


def lengths_for(step_s: float, time_s: float, least_rounds: int = 4) -> tuple[int, ...]:
    """The lengths of which `least_rounds` rounds of pairs fit into the time; two at least."""

    def fits(length: int) -> bool:
        return least_rounds * 2 * (2 * length - 1) * step_s <= time_s

    found = tuple(takewhile(fits, LENGTHS))
    return found if len(found) >= 2 else LENGTHS[:2]


@dataclass(slots=True)
class LengthPilot:
    """Takes the pilot's pairs: `requests` goes to the subject first, `on_segment` gets what comes back.

    Args:
        switch: the subject's `pilot_switch`.
        time_s: how long it may take.
        group: of all its segments.
    """

    switch: str | None
    time_s: float
    group: int = 0
    seed: int = 0
    clock: Callable[[], float] = time.monotonic
    segments: list[Segment] = field(default_factory=list)

    def requests(self) -> Iterator[Request]:
        """Rounds of one pair of each length, in random order, until the time is up."""
        if self.switch is None:
            return
        both = [frozenset({self.switch}), frozenset[str]()]
        started = self.clock()
        yield Request(frozenset(), 1, self.group)
        step_s = self.segments.pop().seconds
        lengths, generator = lengths_for(step_s, self.time_s), random.Random(self.seed)
        rounds = 0
        while rounds < LEAST_PAIRS or self.clock() - started < self.time_s:
            for steps in generator.sample(lengths, len(lengths)):
                for on in generator.sample(both, 2):
                    yield Request(on, steps, self.group)
            rounds += 1

    def on_segment(self, segment: Segment) -> None:
        self.segments.append(segment)

    def costs(self) -> list[LengthCost]:
        """What each length's pairs say."""
        found: dict[int, list[float]] = {}
        for first, second in zip(self.segments[::2], self.segments[1::2], strict=False):
            sign = 1 if first.on else -1
            difference = sign * math.log(first.seconds / second.seconds)
            found.setdefault(first.steps, []).append(difference)
        return [_cost(steps, values) for steps, values in found.items()]

    def decide(self) -> Settled:
        """The answer from the pairs so far."""
        if self.switch is None:
            return Settled(1, True, "no host runs ahead of its device: one step does")
        return shortest_settled(self.costs())


def _cost(steps: int, values: Sequence[float]) -> LengthCost:
    count = len(values)
    error = stdev(values) / math.sqrt(count) if count >= LEAST_PAIRS else math.inf
    return LengthCost(steps, fmean(values), error, count)
