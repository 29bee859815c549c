"""From evidence to a verdict: pure functions, their only output a frozen judgement.

The verdict of `overhead` is about all together; a collector is named when it is blamed, and its own `within`
is said where it can be shown (`one_switch`). Missing or unfit evidence is never green.

In this order, the first that applies: something is missing (exit 5); the work differs (4); a count rose (1);
the machine was unfit, the control was not measured as what it is, or something is faster than it can be (4);
over budget (1); slower or unresolved (3); within (0)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from steptime.records.costs import Estimate, KnownCost, SwitchCost
from steptime.records.pairs import ALL
from steptime.records.types import ExitCode, Verdict
from steptime.statistics import control
from steptime.statistics.counts import KINDS
from steptime.statistics.effects import MIN_LAUNCHES
from steptime.statistics.headline import headline
from steptime.statistics.one_switch import (
    Doubts,
    Observed,
    accounted_over,
    cost_of,
    doubts_of,
    falls_of,
    rises_of,
)

BUDGET_PERCENT: Final = 1.0
"""Default budget of all collectors together."""
COLLECTOR_BUDGET_PERCENT: Final = 0.5
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
        control: None: the run had none.
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
    control: KnownCost | None = None


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
    fault = control.fault(evidence.control)
    unfit = [*unfit, *([fault] if fault else [])]
    doubts = doubts_of(evidence.collectors)
    costs = tuple(
        cost_of(one, budgets.collector_percent, doubts.get(one.name), unfit, evidence.minutes)
        for one in evidence.collectors
    )
    everything = None
    if evidence.all is not None:
        own = doubts_of([evidence.all]).get(evidence.all.name)
        alone = None if own is None else Doubts(own.over, own.slower, own.faster)
        everything = cost_of(evidence.all, budgets.all_percent, alone, unfit, evidence.minutes)
    every = [*evidence.collectors, *([evidence.all] if evidence.all else [])]
    steps = [
        (_incomplete(evidence, counts_required), Verdict.INVALID, ExitCode.INCOMPLETE),
        (_work_differs(evidence, every), Verdict.INVALID, ExitCode.INVALID),
        (
            [f"{one.name}: {text}" for one in every for text in rises_of(one.added)],
            Verdict.OVER,
            ExitCode.OVER,
        ),
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
    costly = [cost for cost in costs if accounted_over(cost.accounted_percent, cost.budget_percent)]
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
    reasons += [f"{one.name}: {text}" for one in every for text in falls_of(one.added)]
    return reasons


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
    doubts = None if found is None else Doubts(found.p_over, found.p_slower, found.p_under)
    cost = cost_of(observed, budget_percent, doubts, unfit, minutes, may_fall=True)
    steps = [
        # Where the work differs nothing was measured, and that is the reason, not what is missing then.
        *([(missing, Verdict.INVALID, ExitCode.INCOMPLETE)] if found or not not_comparable else []),
        (list(not_comparable), Verdict.INVALID, ExitCode.INVALID),
        ([f"{name}: {text}" for text in rises_of(added)], Verdict.OVER, ExitCode.OVER),
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
