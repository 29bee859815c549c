"""From evidence to a verdict: pure functions, their only output a frozen judgement.

The verdict of `overhead` is about all together; a collector is named when it is blamed, and its own `within`
is said where it can be shown. Exact counts and losses are judged before times, because no noise moves them.
Missing or unfit evidence is never green.

In this order, the first that applies: something is missing (exit 5); the work differs (4); a count rose (1);
the machine was unfit, or something is faster than it can be (4); over budget (1); slower or unresolved (3);
within (0)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from steptime.records.costs import Estimate, SwitchCost
from steptime.records.pairs import ALL
from steptime.records.types import ExitCode, Verdict
from steptime.statistics.counts import KINDS
from steptime.statistics.effects import ALPHA, MIN_LAUNCHES
from steptime.statistics.enough import minutes_to_settle
from steptime.statistics.headline import cost_range, headline

BUDGET_PERCENT: Final = 1.0
"""Default budget of all collectors together."""
COLLECTOR_BUDGET_PERCENT: Final = 0.5
BLAME_ALPHA: Final = 0.01
"""Error of calling any collector over its budget, all of a run's collectors taken together (Holm)."""
FASTER_ALPHA: Final = 0.005
"""Error of calling a run invalid because something gains more than its budget."""

CODES: Final[Mapping[Verdict, ExitCode]] = {
    Verdict.WITHIN: ExitCode.WITHIN,
    Verdict.OVER: ExitCode.OVER,
    Verdict.SLOWER: ExitCode.UNRESOLVED,
    Verdict.UNRESOLVED: ExitCode.UNRESOLVED,
    Verdict.INVALID: ExitCode.INVALID,
    Verdict.NO_BASELINE: ExitCode.INCOMPLETE,
}


@dataclass(frozen=True, slots=True)
class Budgets:
    """How much throughput may be lost, percent."""

    all_percent: float = BUDGET_PERCENT
    collector_percent: float = COLLECTOR_BUDGET_PERCENT


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


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that the verdict of `overhead` is taken from.

    Attributes:
        collectors: empty when all were asked about as one (`only_together`).
        incomplete: what went wrong on the way or is missing, one line each ("6 pairs of flush, each, at least
            8 are needed").
        losses_equal: None: no losses arrived for some part.
        loss_notes: which losses differ, or are missing, one line each.
        minutes: that pairs took.
        accepted: what was let through for a stated reason, one line each.
    """

    collectors: tuple[Observed, ...]
    all: Observed | None
    minutes: float
    incomplete: tuple[str, ...] = ()
    losses_equal: bool | None = None
    loss_notes: tuple[str, ...] = ()
    counted: bool = False
    only_together: bool = False
    accepted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict of a run with its reasons, the weightiest first, and what was said of every switch.

    Attributes:
        headline: the strongest true statement, one sentence or two.
        accepted: what was let through for a stated reason, one line each.
    """

    verdict: Verdict
    exit_code: ExitCode
    reasons: tuple[str, ...]
    headline: str = ""
    collectors: tuple[SwitchCost, ...] = ()
    all: SwitchCost | None = None
    accepted: tuple[str, ...] = ()


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
class _Doubts:
    """p of "at most its budget", "nothing" and "gains at most its budget", corrected for how many are
    asked, and the error at which each is believed."""

    over: float
    slower: float
    faster: float
    over_alpha: float = ALPHA


def _doubts(observed: Sequence[Observed]) -> dict[str, _Doubts]:
    known = {one.name: one.estimate for one in observed if one.estimate is not None}
    over = holm({name: found.p_over for name, found in known.items()})
    slower = holm({name: found.p_slower for name, found in known.items()})
    faster = holm({name: found.p_under for name, found in known.items()})
    return {name: _Doubts(over[name], slower[name], faster[name], BLAME_ALPHA) for name in known}


def judge(
    evidence: Evidence,
    budgets: Budgets | None = None,
    unfit: Sequence[str] = (),
    *,
    counts_required: bool = True,
) -> Judgement:
    """The verdict of `overhead`.

    Args:
        unfit: what `machine.unfit` says.
        counts_required: a run without exact counts is incomplete.
    """
    budgets = budgets or Budgets()
    doubts = _doubts(evidence.collectors)
    costs = tuple(
        _cost(one, budgets.collector_percent, doubts.get(one.name), unfit, evidence.minutes)
        for one in evidence.collectors
    )
    everything = None
    if evidence.all is not None:
        own = _doubts([evidence.all]).get(evidence.all.name)
        alone = None if own is None else _Doubts(own.over, own.slower, own.faster)
        everything = _cost(evidence.all, budgets.all_percent, alone, unfit, evidence.minutes)
    every = [*evidence.collectors, *([evidence.all] if evidence.all else [])]
    steps = [
        (_incomplete(evidence, counts_required), Verdict.INVALID, ExitCode.INCOMPLETE),
        (_work_differs(evidence, every), Verdict.INVALID, ExitCode.INVALID),
        ([f"{one.name}: {text}" for one in every for text in _rises(one.added)], Verdict.OVER, ExitCode.OVER),
        (list(unfit), Verdict.INVALID, ExitCode.INVALID),
    ]
    verdict, code, reasons = _first(steps) or _timed(costs, everything, budgets)
    told = headline(verdict, reasons, everything, evidence.minutes, "all together", _settled(evidence))
    said = tuple(dict.fromkeys(reasons))
    return Judgement(verdict, code, said, told, costs, everything, evidence.accepted)


def _settled(evidence: Evidence) -> list[str]:
    """What holds without a clock."""
    parts = ["no count rose"] if evidence.counted else []
    parts += ["losses are equal"] if evidence.losses_equal else []
    if evidence.all is not None and evidence.all.accounted_percent is not None:
        parts.append(f"their own code takes {evidence.all.accounted_percent:.2f}%")
    return parts


def _first(
    steps: Sequence[tuple[list[str], Verdict, ExitCode]],
) -> tuple[Verdict, ExitCode, list[str]] | None:
    """The first step that has a reason, with the reasons of all."""
    said = [reason for reasons, _, _ in steps for reason in reasons]
    return next(((verdict, code, said) for reasons, verdict, code in steps if reasons), None)


def _timed(
    costs: Sequence[SwitchCost], everything: SwitchCost | None, budgets: Budgets
) -> tuple[Verdict, ExitCode, list[str]]:
    """The verdict when only times are left to judge by. A collector that is not proven within its budget
    holds nothing back, as all together bound it; one that is over, or cannot be, does."""
    assert everything is not None
    blamed = [cost for cost in costs if cost.verdict in (Verdict.OVER, Verdict.INVALID)]
    for verdict in (Verdict.INVALID, Verdict.OVER):
        red = [cost for cost in (everything, *blamed) if cost.verdict is verdict]
        if red:
            said = [f"{cost.name}: {text}" for cost in red for text in cost.reasons]
            return verdict, CODES[verdict], said
    verdict = everything.verdict
    said = [f"{everything.name}: {text}" for text in everything.reasons]
    costly = [cost for cost in costs if _accounted_over(cost.accounted_percent, cost.budget_percent)]
    if verdict is Verdict.WITHIN and costly:
        return (
            Verdict.SLOWER,
            ExitCode.UNRESOLVED,
            [f"{cost.name}: {text}" for cost in costly for text in cost.reasons],
        )
    if verdict is Verdict.WITHIN:
        said = [f"all together cost at most {_percent(everything)}%, budget {budgets.all_percent:g}%"]
    return verdict, CODES[verdict], said


def _percent(cost: SwitchCost) -> str:
    return "?" if cost.estimate is None else f"{cost.estimate.high:.2f}"


def _incomplete(evidence: Evidence, counts_required: bool) -> list[str]:
    reasons = list(evidence.incomplete)
    if not evidence.collectors and not evidence.only_together:
        reasons.append("incomplete: no collector was measured")
    missing = [one.name for one in evidence.collectors if one.estimate is None]
    if evidence.all is None or evidence.all.estimate is None:
        missing.append(ALL)
    reasons += [f"incomplete: too few pairs for {name}" for name in missing]
    if counts_required and not evidence.counted:
        reasons.append("incomplete: exact counts were not taken")
    return reasons


def _work_differs(evidence: Evidence, every: Sequence[Observed]) -> list[str]:
    reasons: list[str] = []
    if evidence.losses_equal is not True:
        reasons += evidence.loss_notes or ["no losses were recorded"]
    reasons += [one.count_fault for one in every if one.count_fault]
    reasons += [f"{one.name}: {text}" for one in every for text in _falls(one.added)]
    return reasons


def _rises(added: Mapping[str, int | None] | None) -> list[str]:
    return [f"{kind} rose by {count}" for kind in KINDS if (count := (added or {}).get(kind) or 0) > 0]


def _falls(added: Mapping[str, int | None] | None) -> list[str]:
    return [
        f"{kind} fell by {-count}: with it on, training does not do the same work"
        for kind in KINDS
        if (count := (added or {}).get(kind) or 0) < 0
    ]


def _accounted_over(accounted_percent: float | None, budget_percent: float) -> bool:
    return accounted_percent is not None and accounted_percent > budget_percent


def _cost(
    observed: Observed,
    budget_percent: float,
    doubts: _Doubts | None,
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
        and not _accounted_over(observed.accounted_percent, budget_percent)
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
    doubts: _Doubts | None,
    unfit: Sequence[str],
    may_fall: bool,
) -> tuple[Verdict, list[str]]:
    if observed.count_fault:
        return Verdict.INVALID, [observed.count_fault]
    if observed.losses_differ:
        return Verdict.INVALID, ["it changes the losses"]
    falls = [] if may_fall else _falls(observed.added)
    if falls:
        return Verdict.INVALID, falls
    rises = _rises(observed.added)
    if rises:
        return Verdict.OVER, rises
    if observed.estimate is None or doubts is None:
        return Verdict.INVALID, ["not measured"]
    if unfit:
        return Verdict.INVALID, ["the machine was unfit"]
    if doubts.faster <= FASTER_ALPHA and not may_fall:
        return Verdict.INVALID, [
            f"faster by {-observed.estimate.percent:.2f}% when on: it cannot be doing the same work"
        ]
    return _judge_time(observed, observed.estimate, budget_percent, doubts)


def _judge_time(
    observed: Observed, found: Estimate, budget_percent: float, doubts: _Doubts
) -> tuple[Verdict, list[str]]:
    budget = f"budget {budget_percent:g}%"
    if doubts.over <= doubts.over_alpha:
        return Verdict.OVER, [f"it costs {cost_range(found)}, {budget}"]
    if _accounted_over(observed.accounted_percent, budget_percent):
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


def judge_gate(
    found: Estimate | None,
    budget_percent: float,
    *,
    minutes: float,
    launches: int,
    added: Mapping[str, int | None] | None = None,
    incomplete: Sequence[str] = (),
    not_comparable: Sequence[str] = (),
    unfit: Sequence[str] = (),
    accepted: Sequence[str] = (),
    memory_rise: str = "",
    name: str = "head",
) -> Judgement:
    """The verdict of `gate`, head against base, by the same order as `judge`.

    Fewer counts, and a faster head, are good news. `memory_rise`: a line when every launch of head takes
    clearly more memory than every launch of base."""
    missing = list(incomplete)
    if found is None and not not_comparable:
        missing.append(f"incomplete: {launches} whole launches; at least {MIN_LAUNCHES} are needed")
    observed = Observed(name, found, added=added)
    doubts = None if found is None else _Doubts(found.p_over, found.p_slower, found.p_under)
    cost = _cost(observed, budget_percent, doubts, unfit, minutes, may_fall=True)
    steps = [
        # Where the work differs nothing was measured, and that is the reason, not what is missing then.
        *([(missing, Verdict.INVALID, ExitCode.INCOMPLETE)] if found or not not_comparable else []),
        (list(not_comparable), Verdict.INVALID, ExitCode.INVALID),
        ([f"{name}: {text}" for text in _rises(added)], Verdict.OVER, ExitCode.OVER),
        (list(unfit), Verdict.INVALID, ExitCode.INVALID),
        ([memory_rise] if memory_rise else [], Verdict.OVER, ExitCode.OVER),
    ]
    verdict, code, reasons = _first(steps) or (
        cost.verdict,
        CODES[cost.verdict],
        [f"{name}: {text}" for text in cost.reasons],
    )
    told = headline(verdict, reasons, cost, minutes, name, _good_news(cost))
    return Judgement(verdict, code, tuple(dict.fromkeys(reasons)), told, (), cost, tuple(accepted))


def _good_news(cost: SwitchCost) -> list[str]:
    news = [f"{-count} fewer {kind}" for kind in KINDS if (count := (cost.added or {}).get(kind) or 0) < 0]
    if cost.estimate is not None and cost.estimate.high < 0:
        news.insert(0, f"it is faster by {-cost.estimate.percent:.2f}%")
    return news
