"""How long a segment of each layer is: pure.

Path segments are as short as is valid: one step from standstill to standstill where the cost of a planted
wait has settled at one step, more on a GPU, whose host must have run ahead first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from bench.records.pairs import Layer

MIN_SEGMENT_S: Final = 0.01
"""Steps of a few microseconds need a floor, or switching takes all the time."""
ENDS_SHARE: Final = 0.25
"""Segments get longer until their ends (drain, switches, refill) take no more than this share of the time."""
MAX_STEPS: Final = 256


@dataclass(frozen=True, slots=True)
class Pilot:
    """What the first segments took, seconds.

    Attributes:
        step_s: one step with everything off, from standstill to standstill.
        tick_segment_s, flush_segment_s: a step with one forced tick, or one forced flush, everything on.
        ends_s: between two segments, where nothing is timed.
    """

    step_s: float
    tick_segment_s: float
    flush_segment_s: float
    ends_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Lengths:
    """Steps of a segment by layer, and how long it takes.

    Attributes:
        path_segment_s, tick_segment_s, flush_segment_s: seconds that a segment is thought to take.
        ends_s: seconds between two segments.
        settled_steps: fewest steps at which a planted wait costs what it costs in long segments.
    """

    path_steps: int
    tick_steps: int
    flush_steps: int
    path_segment_s: float
    tick_segment_s: float
    flush_segment_s: float
    ends_s: float = 0.0
    settled_steps: int = 1

    def steps(self, layer: Layer) -> int:
        """Steps of a segment of that layer."""
        return {Layer.PATH: self.path_steps, Layer.TICK: self.tick_steps, Layer.FLUSH: self.flush_steps}[
            layer
        ]

    def pair_s(self, layer: Layer) -> float:
        """Seconds of a pair of that layer, both halves with their ends."""
        segment_s = {
            Layer.PATH: self.path_segment_s,
            Layer.TICK: self.tick_segment_s,
            Layer.FLUSH: self.flush_segment_s,
        }[layer]
        return 2 * (segment_s + self.ends_s)


def choose(pilot: Pilot, settled_steps: int = 1, min_segment_s: float = MIN_SEGMENT_S) -> Lengths:
    """The shortest valid lengths.

    Raises:
        ValueError: a step that took no time.
    """
    if pilot.step_s <= 0:
        raise ValueError("a step must take some time")
    least_s = max(min_segment_s, pilot.ends_s * (1.0 / ENDS_SHARE - 1.0))
    wanted = math.ceil(least_s / pilot.step_s - 1e-9)
    path = min(MAX_STEPS, max(1, settled_steps, wanted))
    extra = (path - 1) * pilot.step_s
    return Lengths(
        path_steps=path,
        tick_steps=path,
        flush_steps=path,
        path_segment_s=path * pilot.step_s,
        tick_segment_s=pilot.tick_segment_s + extra,
        flush_segment_s=pilot.flush_segment_s + extra,
        ends_s=pilot.ends_s,
        settled_steps=settled_steps,
    )
