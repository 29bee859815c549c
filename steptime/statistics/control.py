"""The control: a switch that loses a known time in each step, found by the test that finds any other. Pure.

A run whose clock, switches or estimator do not work would find nothing where nothing costs, and look well.
So every full run has one cost that is known, in the path's pairs for each alone. What it lost is measured
where it is lost; what it was measured as comes from the pairs, like any collector's cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from steptime.records.costs import Estimate, KnownCost
from steptime.records.pairs import CONTROL, Layer, Pair, Question
from steptime.records.types import log_ratio, slowdown_percent
from steptime.statistics.design import MIN_PAIRS
from steptime.statistics.effects import REDRAWS, redraw, sample, total

CONTROL_PERCENT: Final = 2.0
"""Of each step, about: what it comes to is measured."""
CONTROL_ALPHA: Final = 0.005
"""Error of calling a run invalid because its control was not measured as what it is."""
NEAR: Final = 0.1
"""What the control lost in its thread is what the throughput lost, give or take this share of it: other
stages can hide a little of it, and other threads of a crowded machine can add to it."""
DEAD_PERCENT: Final = CONTROL_PERCENT / 10
"""A control that loses less than this does not work."""


def lost_percent(pairs: Sequence[Pair]) -> float:
    """What the control took of the throughput by its own clock, over the path's pairs that have it; 0 without
    any. The mean of the logarithms, as the estimate is one."""
    halves = [
        half
        for pair in pairs
        if pair.layer is Layer.PATH and pair.sign(CONTROL)
        for half in (pair.first, pair.second)
        if CONTROL in half.on
    ]
    if not halves:
        return 0.0
    shares = np.array([min(half.control_s / half.seconds, 0.999) for half in halves])
    return slowdown_percent(float(np.mean(-np.log1p(-shares))))


def known_cost(
    pairs: Sequence[Pair], switches: Sequence[str], seed: int = 0, redraws: int = REDRAWS
) -> KnownCost | None:
    """The control of a run; None: it had none, or too few pairs."""
    chosen = sample(pairs, Layer.PATH, Question.EACH, switches)
    if CONTROL in switches or CONTROL not in chosen.names or len(chosen.y) < MIN_PAIRS:
        return None
    percent = lost_percent(pairs)
    part = redraw(chosen, 8 * seed, rows=redraws)
    column = chosen.names.index(CONTROL)
    least, most = log_ratio((1.0 - NEAR) * percent), log_ratio((1.0 + NEAR) * percent)
    p_more, p_less = np.mean(part.low[:, column] <= most), np.mean(part.high[:, column] >= least)
    return KnownCost(percent, total([part], CONTROL, percent), min(1.0, 2.0 * float(min(p_more, p_less))))


def fault(control: KnownCost | None) -> str:
    """Why no time of the run can be trusted, or empty. A control that works is refused in at most
    `CONTROL_ALPHA` of the runs."""
    if control is None:
        return ""
    if control.percent < DEAD_PERCENT:
        return f"the control lost {control.percent:.2f}% where {CONTROL_PERCENT:g}% was asked of it"
    if control.p_value <= CONTROL_ALPHA:
        return f"the control: {as_measured(control)}"
    return ""


def as_measured(control: KnownCost) -> str:
    """`a known 2.0% was measured as 2.1% [1.6, 2.6]`."""
    found: Estimate = control.estimate
    bounds = f"[{found.low:.1f}, {found.high:.1f}]"
    return f"a known {control.percent:.1f}% was measured as {found.percent:.1f}% {bounds}"


def told(control: KnownCost) -> str:
    """The same, and what it says of the run."""
    found, said = control.estimate, as_measured(control)
    if fault(control):
        return f"{said}: NOT as it is, so no time of this run can be trusted"
    if not found.low <= control.percent <= found.high:
        return f"{said}: missed, as one run in ten does by chance"
    if found.low <= 0.0:
        return f"{said}: not told from nothing in so few pairs"
    return said
