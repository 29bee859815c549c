"""How long a segment of each layer is: pure.

Path segments are as short as is valid: one step from standstill to standstill where the cost of a planted
wait has settled at one step, more on a GPU, whose host must have run ahead first. Segments with a forced tick
or flush are as long as covers all that it starts (`steptime.subjects.pairs.covers`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from steptime.records.pairs import Layer
from steptime.records.types import STRICT

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
        event_steps: steps that a segment with a forced tick, or flush, needs to cover it; only the layers
            that the subject has.
        event_s: seconds of the longest such segment of the pilot beyond its steps.
        ends_s: between two segments, where nothing is timed.
    """

    step_s: float
    event_steps: dict[Layer, int]
    event_s: dict[Layer, float]
    ends_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Lengths:
    """Steps of a segment by layer, and how long it takes.

    Attributes:
        steps: by layer; the layers that are measured.
        segment_s: seconds that a segment is thought to take, by layer.
        ends_s: seconds between two segments.
        settled_steps: fewest steps at which a planted wait costs what it costs in long segments.
    """

    __pydantic_config__ = STRICT

    steps: dict[Layer, int]
    segment_s: dict[Layer, float]
    ends_s: float = 0.0
    settled_steps: int = 1

    def pair_s(self, layer: Layer) -> float:
        """Seconds of a pair of that layer, both halves with their ends."""
        return 2 * (self.segment_s[layer] + self.ends_s)


def choose(pilot: Pilot, settled_steps: int = 1, min_segment_s: float = MIN_SEGMENT_S) -> Lengths:
    """The shortest valid lengths.

    Raises:
        ValueError: a step that took no time.
    """
    step_s = pilot.step_s
    if step_s <= 0:
        raise ValueError("a step must take some time")
    least_s = max(min_segment_s, pilot.ends_s * (1.0 / ENDS_SHARE - 1.0))
    wanted = math.ceil(least_s / step_s - 1e-9)
    steps = {Layer.PATH: min(MAX_STEPS, max(1, settled_steps, wanted))}
    for layer, least in pilot.event_steps.items():
        steps[layer] = max(steps[Layer.PATH], least)
    # All that a tick takes may be taken from the steps.
    segment_s = {layer: n * step_s + pilot.event_s.get(layer, 0.0) for layer, n in steps.items()}
    return Lengths(steps, segment_s, pilot.ends_s, settled_steps)
