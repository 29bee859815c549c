"""Tokens per second with everything off: from the off halves of the pairs drawn for all together. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
from scipy import special

from steptime.records.pairs import CONTROL, PLACEBO, Layer, Pair, Question, Segment
from steptime.records.types import Throughput

BATCHES: Final = 10
"""Neighbouring segments share the machine's slow noise, so the interval comes from the means of so many
stretches of the run."""


def off_segments(pairs: Iterable[Pair], process: int | None = None) -> list[Segment]:
    """Path halves with nothing on (but the placebo), in the order taken."""
    return [
        segment
        for pair in pairs
        if pair.layer is Layer.PATH and process in (None, pair.process)
        for segment in (pair.first, pair.second)
        if not set(segment.on) - {PLACEBO}
    ]


def on_segments(pairs: Iterable[Pair], switch: str) -> list[Segment]:
    """Path halves that have the switch on, and not the control, in the order taken."""
    return [
        segment
        for pair in pairs
        if pair.layer is Layer.PATH
        for segment in (pair.first, pair.second)
        if switch in segment.on and (switch == CONTROL or CONTROL not in segment.on)
    ]


def all_segments(pairs: Iterable[Pair]) -> list[Segment]:
    """Path halves with everything on, in the order taken: of the pairs drawn for all together, or of all
    pairs where there is a single switch."""
    path = [pair for pair in pairs if pair.layer is Layer.PATH]
    drawn = [pair for pair in path if pair.question is Question.TOGETHER] or path
    halves = [half for pair in drawn for half in (pair.first, pair.second)]
    return [half for half in halves if set(half.on) - {PLACEBO}]


def throughput(pairs: Iterable[Pair]) -> Throughput | None:
    """Geometric mean of tokens per second with a 90% interval; None below two stretches of segments."""
    found = of_segments(off_segments(pairs))
    return None if found is None else Throughput(*found)


def of_segments(segments: Iterable[Segment]) -> tuple[float, float, float] | None:
    """Mean, low and high tokens per second of segments in the order taken."""
    logs = np.array([np.log(segment.tokens / segment.seconds) for segment in segments])
    if len(logs) < 2:
        return None
    means = np.array([part.mean() for part in np.array_split(logs, min(BATCHES, len(logs)))])
    half = float(special.stdtrit(len(means) - 1, 0.95)) * float(means.std(ddof=1)) / len(means) ** 0.5
    centre, low, high = np.exp([logs.mean(), logs.mean() - half, logs.mean() + half])
    return float(centre), float(low), float(high)
