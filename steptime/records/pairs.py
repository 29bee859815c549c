"""Pairs of neighbouring segments, the unit of every comparison: one half has a set of switches on, the other
half its complement, and both do equal work.

A switch is a collector in `overhead` and the commit `head` in `gate`. `Request` is what the conductor asks a
subject for, `Segment` what comes back, `Pair` two of them side by side."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from steptime.records.types import ALL as ALL
from steptime.records.types import STRICT

PLACEBO: Final = "placebo"
"""A switch that does nothing. It is measured like the others, and shows the noise."""
CONTROL: Final = "control"
"""A switch that loses a known time in each step. What is measured of it is held against what it lost."""


class Layer(enum.StrEnum):
    """Where a cost falls. Each layer has pairs of its own, and its own unit."""

    PATH = "path"
    """In the workers' path, a share of each step: no tick and no flush falls into the segment."""
    TICK = "tick"
    """In the monitor's tick, seconds each: the instruments of all switches are on in both halves, and each
    half holds one whole tick, which samples the collectors that the half names."""
    FLUSH = "flush"
    """In the monitor's flush, seconds each: likewise one whole flush, sinks included."""


class Question(enum.StrEnum):
    """What a pair is drawn for."""

    EACH = "each"
    """A random set against its complement: says something about every switch."""
    TOGETHER = "together"
    """All against none; the placebo's coin is tossed by itself."""


@dataclass(frozen=True, slots=True)
class Request:
    """One segment to take.

    Attributes:
        on: the switches that are on.
        steps: optimizer steps to time.
        group: place in the cycle of the step's group of batches, which is repeated for each of its steps. A
            subject whose group differs from the one before drops lead-in steps until every stage holds the
            new group alone.
        layer: whether a tick or a flush is forced inside the segment.
        pair, half: which pair it belongs to (-1: none, a pilot), and 0 or 1.
    """

    on: frozenset[str]
    steps: int
    group: int
    layer: Layer = Layer.PATH
    pair: int = -1
    half: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """Some steps on one group of batches, timed as one, from standstill to standstill.

    Attributes:
        on: the switches that were on, sorted.
        steps: timed steps.
        tokens: real context tokens trained on in them.
        seconds: wall time of them, the forced tick or flush included.
        group: place in the cycle of the repeated group of batches.
        first_step: number of the first timed step in the subject's run, by which losses that come late are
            laid beside it.
        step_seconds: wall time of each step, `[steps]`; empty when only the whole was timed.
        tick_s: time that the forced tick or flush itself took, 0 in the path layer.
        control_s: time that the control lost in it, by its own clock; 0 where it was off.
    """

    __pydantic_config__ = STRICT

    on: tuple[str, ...]
    steps: int
    tokens: int
    seconds: float
    group: int = 0
    first_step: int = 0
    step_seconds: tuple[float, ...] = ()
    tick_s: float = 0.0
    control_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pair:
    """Two neighbouring segments of equal work.

    Attributes:
        number: from 0 in the order taken, inside its process.
        first, second: in the order taken.
        process: which launch it belongs to, from 0.
        losses_equal: whether every step of both halves gave the loss that its group has always given, bit for
            bit; None: no loss arrived.
    """

    __pydantic_config__ = STRICT

    number: int
    layer: Layer
    question: Question
    first: Segment
    second: Segment
    process: int = 0
    losses_equal: bool | None = None

    def sign(self, switch: str) -> int:
        """+1: on in the first half alone; -1: in the second alone; 0: the pair says nothing about it."""
        return (switch in self.first.on) - (switch in self.second.on)
