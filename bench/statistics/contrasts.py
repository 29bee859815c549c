"""From segments to one number for each round: the contrast of an arm with its control. Pure.

theta is ln(seconds per token, arm) - ln(seconds per token, control), measured inside a round, where the
machine was the same for both as nearly as it ever is. A round's theta is taken in two ways:

- *plain*: whole segments, ln(seconds / tokens). What a user feels, and as noisy as the machine.
- *step*: both arms replay the same batches, so step i of one pairs with step i of the other; the midmean
  (mean of the middle half, weighted by how long each batch takes) of the paired log differences. A stall of
  the machine falls on few steps and is trimmed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bench.records.types import Segment

Floats = NDArray[np.float64]

TRIM: Final = 0.25
"""Weight cut from each end of the paired step differences."""
TAIL_WIDTH: Final = 3.0
"""Robust standard deviations beyond which a paired step counts as slow (or fast)."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Contrast of every whole round. Arrays `[rounds]`, log units.

    Attributes:
        process: which process the round belongs to.
        plain: contrast of whole segments.
        step: midmean contrast of paired steps; empty when steps were not timed.
        tail: share of the time in steps far slower than their partner less the share far faster; empty
            likewise.
    """

    process: NDArray[np.int64]
    plain: Floats
    step: Floats
    tail: Floats

    def __len__(self) -> int:
        return len(self.plain)


def midmean(values: Floats, weights: Floats, trim: float = TRIM) -> Floats:
    """Weighted mean of what is left of `values` `[..., k]` after `trim` of the weight is cut from each end.

    `weights` `[k]` or like `values`, positive. A value on the edge keeps the part of its weight that is
    inside. Returns `[...]`."""
    weights = np.broadcast_to(weights, values.shape)
    order = np.argsort(values, axis=-1)
    ranked = np.take_along_axis(values, order, axis=-1)
    upper = np.cumsum(np.take_along_axis(weights, order, axis=-1), axis=-1)
    total = upper[..., -1:]
    upper = upper / total
    lower = np.concatenate([np.zeros_like(upper[..., :1]), upper[..., :-1]], axis=-1)
    kept = np.clip(np.minimum(upper, 1.0 - trim) - np.maximum(lower, trim), 0.0, None)
    result: Floats = (ranked * kept).sum(axis=-1) / kept.sum(axis=-1)
    return result


def tail_excess(differences: Floats, weights: Floats, centre: Floats) -> Floats:
    """Weight share of `differences` `[..., k]` far above `centre` `[...]` less the share far below.

    Under exchangeable noise both tails of a paired difference are alike, so the expectation is 0 whatever the
    machine does."""
    weights = np.broadcast_to(weights, differences.shape)
    away = differences - centre[..., None]
    width = TAIL_WIDTH * 1.4826 * np.median(np.abs(away), axis=-1, keepdims=True)
    far = np.where(np.abs(away) > width, np.sign(away), 0.0)
    result: Floats = (far * weights).sum(axis=-1) / weights.sum(axis=-1)
    return result


def by_phase(segment: Segment, cycle: int) -> dict[tuple[int, int], float]:
    """Seconds of each step under (place in the cycle, how often that place came before in this segment)."""
    return {((segment.phase + i) % cycle, i // cycle): s for i, s in enumerate(segment.step_seconds)}


def rounds_of(segments: Iterable[Segment]) -> dict[tuple[int, int], list[Segment]]:
    """Segments under (process, round), in the order taken."""
    groups: dict[tuple[int, int], list[Segment]] = {}
    for segment in segments:
        groups.setdefault((segment.process, segment.round), []).append(segment)
    return groups


def contrast_of_round(
    members: Sequence[Segment], arms: Sequence[str], controls: Sequence[str], cycle: int
) -> tuple[float, float, float] | None:
    """(plain, step, tail) of one round: mean of `arms` against mean of `controls`; None when an arm is
    missing.

    step and tail are NaN unless every segment timed its steps and pairs have at least half of their steps in
    common."""
    present = {segment.arm for segment in members}
    if not present.issuperset(arms) or not present.issuperset(controls):
        return None
    treated = [segment for segment in members if segment.arm in arms]
    control = [segment for segment in members if segment.arm in controls]
    plain = _mean_log(treated, arms) - _mean_log(control, controls)
    step, tail = _paired(members, treated, control, cycle)
    return plain, step, tail


def _mean_log(segments: Sequence[Segment], arms: Sequence[str]) -> float:
    """Mean over arms (each counted once, however often it was measured) of ln(seconds per token)."""
    logs = [
        np.mean([np.log(s.seconds / s.tokens) for s in segments if s.arm == arm])
        for arm in dict.fromkeys(arms)
    ]
    return float(np.mean(logs))


def _paired(
    members: Sequence[Segment], treated: Sequence[Segment], control: Sequence[Segment], cycle: int
) -> tuple[float, float]:
    steps = {id(s): by_phase(s, cycle) for s in members if s.step_seconds}
    if any(id(s) not in steps for s in (*treated, *control)):
        return np.nan, np.nan
    shortest: dict[tuple[int, int], float] = {}
    for timed in steps.values():
        for key, seconds in timed.items():
            shortest[key] = min(seconds, shortest.get(key, seconds))
    per_arm: dict[str, list[tuple[float, float]]] = {}
    for one in treated:
        for other in control:
            a, b = steps[id(one)], steps[id(other)]
            common = [key for key in a if key in b]
            if 2 * len(common) < max(len(a), len(b)):
                return np.nan, np.nan
            differences = np.array([np.log(a[key] / b[key]) for key in common])
            weights = np.array([shortest[key] for key in common])
            centre = midmean(differences, weights)
            per_arm.setdefault(one.arm, []).append(
                (float(centre), float(tail_excess(differences, weights, centre)))
            )
    means = np.array([np.mean(pairs, axis=0) for pairs in per_arm.values()])
    step, tail = means.mean(axis=0)
    return float(step), float(tail)


def collect(rows: Iterable[tuple[int, tuple[float, float, float]]]) -> Rounds:
    """(process, contrast of a round) pairs as arrays; the step estimator only when every round has it."""
    rows = list(rows)
    process = np.array([p for p, _ in rows], dtype=np.int64)
    values = np.array([row for _, row in rows], dtype=np.float64).reshape(len(rows), 3)
    timed = len(rows) > 0 and bool(np.isfinite(values[:, 1:]).all())
    none = np.empty(0)
    return Rounds(process, values[:, 0], values[:, 1] if timed else none, values[:, 2] if timed else none)


def contrasts(
    segments: Iterable[Segment], arms: Sequence[str], controls: Sequence[str], cycle: int
) -> Rounds:
    """The contrast of every round that holds all of `arms` and `controls`."""
    found = []
    for (process, _), members in rounds_of(segments).items():
        row = contrast_of_round(members, arms, controls, cycle)
        if row is not None:
            found.append((process, row))
    return collect(found)
