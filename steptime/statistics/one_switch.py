"""What is said of one switch, from what speaks for or against it. Pure.

Exact counts and losses are judged before times, because no noise moves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from steptime.records.costs import Estimate, SwitchCost
from steptime.records.types import Verdict
from steptime.statistics.counts import KINDS
from steptime.statistics.effects import ALPHA
from steptime.statistics.enough import minutes_to_settle
from steptime.statistics.headline import cost_range

BLAME_ALPHA: Final = 0.01
"""Error of calling any collector over its budget, all of a run's collectors taken together (Holm)."""
FASTER_ALPHA: Final = 0.005
"""Error of calling a run invalid because something gains more than its budget."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What speaks for or against one collector, or all together.

    Attributes:
        estimate: None: too few pairs of some layer.
        accounted_percent: what its own code and the monitor's work for it take of the step, from an
            undisturbed stretch.
        added: kind -> count with it on less the count with all off, over the same steps; None where this
            machine cannot count the kind. Rises that were allowed are taken off already.
        count_fault: why its counts mean nothing, or empty.
        losses_differ: the training with it on gave other losses.
    """

    name: str
    estimate: Estimate | None
    accounted_percent: float | None = None
    added: Mapping[str, int | None] | None = None
    count_fault: str = ""
    losses_differ: bool = False


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p of each name: naming any at the family's error needs p <= alpha. (To pass all, no
    adjustment is due.)"""
    adjusted: dict[str, float] = {}
    running = 0.0
    ranked = sorted(p_values.items(), key=lambda item: item[1])
    for place, (name, p) in enumerate(ranked):
        running = max(running, min(1.0, (len(ranked) - place) * p))
        adjusted[name] = running
    return adjusted


@dataclass(frozen=True, slots=True)
class Doubts:
    """p of "at most its budget", "nothing" and "gains at most its budget", corrected for how many are asked,
    and the error at which each is believed."""

    over: float
    slower: float
    faster: float
    over_alpha: float = ALPHA


def doubts_of(observed: Sequence[Observed]) -> dict[str, Doubts]:
    known = {one.name: one.estimate for one in observed if one.estimate is not None}
    over = holm({name: found.p_over for name, found in known.items()})
    slower = holm({name: found.p_slower for name, found in known.items()})
    faster = holm({name: found.p_under for name, found in known.items()})
    return {name: Doubts(over[name], slower[name], faster[name], BLAME_ALPHA) for name in known}


def rises_of(added: Mapping[str, int | None] | None) -> list[str]:
    return [f"{kind} rose by {count}" for kind in KINDS if (count := (added or {}).get(kind) or 0) > 0]


def falls_of(added: Mapping[str, int | None] | None) -> list[str]:
    return [
        f"{kind} fell by {-count}: with it on, training does not do the same work"
        for kind in KINDS
        if (count := (added or {}).get(kind) or 0) < 0
    ]


def accounted_over(accounted_percent: float | None, budget_percent: float) -> bool:
    return accounted_percent is not None and accounted_percent > budget_percent


def cost_of(
    observed: Observed,
    budget_percent: float,
    doubts: Doubts | None,
    unfit: Sequence[str],
    minutes: float,
    *,
    may_fall: bool = False,
) -> SwitchCost:
    """`may_fall`: fewer counts, and being faster, are good news (a gate)."""
    verdict, reasons = _judge_one(observed, budget_percent, doubts, unfit, may_fall)
    open_ = verdict in (Verdict.UNRESOLVED, Verdict.SLOWER)
    settle = None
    if (
        open_
        and observed.estimate is not None
        and not accounted_over(observed.accounted_percent, budget_percent)
    ):
        settle = minutes_to_settle(observed.estimate.standard_error, budget_percent, minutes)
    return SwitchCost(
        name=observed.name,
        estimate=observed.estimate,
        budget_percent=budget_percent,
        verdict=verdict,
        reasons=tuple(reasons),
        accounted_percent=observed.accounted_percent,
        added=None if observed.added is None else dict(observed.added),
        minutes_to_settle=settle,
    )


def _judge_one(
    observed: Observed,
    budget_percent: float,
    doubts: Doubts | None,
    unfit: Sequence[str],
    may_fall: bool,
) -> tuple[Verdict, list[str]]:
    if observed.count_fault:
        return Verdict.INVALID, [observed.count_fault]
    if observed.losses_differ:
        return Verdict.INVALID, ["it changes the losses"]
    falls = [] if may_fall else falls_of(observed.added)
    if falls:
        return Verdict.INVALID, falls
    rises = rises_of(observed.added)
    if rises:
        return Verdict.OVER, rises
    if observed.estimate is None or doubts is None:
        return Verdict.INVALID, ["not measured"]
    if unfit:
        return Verdict.INVALID, ["no time of this run is judged"]
    if doubts.faster <= FASTER_ALPHA and not may_fall:
        return Verdict.INVALID, [
            f"faster by {-observed.estimate.percent:.2f}% when on: it cannot be doing the same work"
        ]
    return _judge_time(observed, observed.estimate, budget_percent, doubts)


def _judge_time(
    observed: Observed, found: Estimate, budget_percent: float, doubts: Doubts
) -> tuple[Verdict, list[str]]:
    budget = f"budget {budget_percent:g}%"
    if doubts.over <= doubts.over_alpha:
        return Verdict.OVER, [f"it costs {cost_range(found)}, {budget}"]
    if accounted_over(observed.accounted_percent, budget_percent):
        return Verdict.SLOWER, [f"its own code takes {observed.accounted_percent:.2f}% of the step, {budget}"]
    if found.high < budget_percent:
        if precise(found, budget_percent):
            return Verdict.WITHIN, [f"at most {found.high:.2f}%, {budget}"]
        return Verdict.UNRESOLVED, [
            f"not resolved: {cost_range(found)} is under the budget by luck, as no cost is below zero"
        ]
    if doubts.slower <= ALPHA:
        return Verdict.SLOWER, [f"slower by {cost_range(found)}, not resolved against the {budget}"]
    return Verdict.UNRESOLVED, [
        f"not resolved: {cost_range(found)}, {budget}; smallest cost found: {found.mde:.2f}%"
    ]


def precise(found: Estimate, budget_percent: float) -> bool:
    """The bound lies no further above the estimate than the budget is wide.

    Else it is under the budget only because the estimate is far below zero, which no cost is: the luck of a
    noisy run."""
    return found.high - found.percent <= budget_percent
