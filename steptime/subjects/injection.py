"""Costs of known size, put where a collector's may fall: `--inject PERCENT[@PLACE]`."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from steptime.errors import UserError, nearest
from steptime.records.pairs import Layer
from steptime.subjects.protocol import INJECTED


class Place(enum.StrEnum):
    """Where the time is lost, each in the thread that a real cost of its kind falls into."""

    STEP = "step"
    """In every worker, at its step boundary: so much of the worker's own time that the throughput drops by
    the percentage, whichever stage is the slowest."""
    TARGET = "target"
    """In the targets alone: the throughput drops by as much as they are the slowest stage."""
    TICK = "tick"
    """A busy loop in the monitor, in each tick."""
    FLUSH = "flush"
    """A busy loop in the monitor, in each flush."""
    SINK = "sink"
    """A busy loop in a sink's thread, for each flush."""
    LOCK = "gil"
    """The interpreter's lock held through each tick."""
    THREAD = "thread"
    """A busy loop in a thread of its own, a second after each tick."""


LAYER = {
    Place.STEP: Layer.PATH,
    Place.TARGET: Layer.PATH,
    Place.TICK: Layer.TICK,
    Place.LOCK: Layer.TICK,
    Place.THREAD: Layer.TICK,
    Place.FLUSH: Layer.FLUSH,
    Place.SINK: Layer.FLUSH,
}


@dataclass(frozen=True, slots=True)
class Injection:
    """A switch that loses a known share of the time: of every step, or of a tick's or a flush's period."""

    percent: float
    place: Place = Place.STEP
    label: str = ""

    @property
    def name(self) -> str:
        """Of its switch: the label where there are several in one place."""
        if self.label:
            return self.label
        return INJECTED if self.place is Place.STEP else f"{INJECTED}@{self.place}"

    @property
    def layer(self) -> Layer:
        """The layer whose pairs must find it."""
        return LAYER[self.place]

    def seconds(self, tick_s: float, flush_s: float) -> float:
        """Lost at each tick or flush; 0 in the path."""
        return self.percent / 100.0 * {Layer.PATH: 0.0, Layer.TICK: tick_s, Layer.FLUSH: flush_s}[self.layer]


def parse_injection(text: str) -> Injection:
    """`5`, `5@tick`.

    Raises:
        UserError: no number from 0 to below 100, or no such place.
    """
    number, _, place = text.partition("@")
    try:
        percent = float(number)
    except ValueError:
        percent = -1.0
    if not 0.0 <= percent < 100.0:
        raise UserError(
            f"--inject {text}: PERCENT[@PLACE], a percentage from 0 to below 100, e.g. 5 or 2@tick"
        )
    places = [one.value for one in Place]
    if place and place not in places:
        raise UserError(
            f"--inject {text}: no such place{nearest(place, places)} (places: {', '.join(places)})"
        )
    return Injection(percent, Place(place or Place.STEP))
