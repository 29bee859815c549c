"""Pure: intervals, counts and faults in, verdict and exit code out (docs/judging.md).

Exact counts are compared exactly and need no statistics; timing is judged by its bounds. Passing needs every
collector within its budget (intersection-union: no correction for their number); blaming one, as over its
budget or as slower at all, needs Holm's correction over all of them. Nothing passes on nothing: what is
missing, unarmed or unfit has a verdict of its own, and none of those is green."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from bench.records.types import ALL, Cost, ExitCode, Interval, Verdict
from bench.statistics.analysis import COUNT_KINDS, Analysis, CollectorEvidence
from bench.statistics.intervals import ALPHA, NOMINAL, holm, p_over, p_under
from bench.statistics.stopping import MIN_ROUNDS

BUDGET_PERCENT: Final = 1.0
"""Default budget of all collectors together."""
COLLECTOR_BUDGET_PERCENT: Final = 0.5
AA_ALPHA: Final = 0.005
"""Error of the checks that make a run invalid (A/A, faster when on): one run in 200 is so by chance."""
AA_SHARE: Final = 0.25
"""Share of a collector's budget below which a difference between `off` and `off-again` does no harm."""
FLIP_REACH: Final = 5
"""From so many units on the sign-flip test can reach 0.05 (2^-5) and must agree before anything is called
slower."""
CORRECTED: Final = "not proven once corrected for the number of contrasts"

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
class Judgement:
    """The verdict of a run with its reasons, the weightiest first, and the cost of every collector."""

    verdict: Verdict
    exit_code: ExitCode
    reasons: tuple[str, ...]
    collectors: tuple[Cost, ...] = ()
    all: Cost | None = None


def classify(found: Interval, budget_percent: float) -> Verdict:
    """The verdict of one interval against one budget. `within` wins over `slower`: a proven small cost is
    within."""
    slower = found.low > 0 and flip_agrees(found)
    if found.high < budget_percent:
        return (
            Verdict.WITHIN
            if plain_agrees(found, budget_percent) and precise(found, budget_percent)
            else Verdict.UNRESOLVED
        )
    if found.low > budget_percent and slower:
        return Verdict.OVER
    return Verdict.SLOWER if slower else Verdict.UNRESOLVED


def flip_agrees(found: Interval) -> bool:
    """The sign-flip test also calls it slower, or has too few units to say so."""
    return found.sign_flip_p is None or found.n < FLIP_REACH or found.sign_flip_p <= ALPHA


def precise(found: Interval, budget_percent: float) -> bool:
    """The bound lies no further above the estimate than the budget is wide.

    Else it is under the budget only because the estimate is far below zero, which no cost is: the luck of a
    noisy run."""
    return found.high - found.percent <= budget_percent


def plain_agrees(found: Interval, budget_percent: float) -> bool:
    """Whole segments also lost less than the budget, alone or in the arms with others on, as far as a point
    estimate tells.

    What falls on few steps does not move the middle ones; this is what keeps it from passing.
    """
    return (
        min((p for p in (found.plain_percent, found.ceiling_percent) if p is not None), default=-inf)
        < budget_percent
    )


def judge(
    analysis: Analysis,
    budgets: Budgets | None = None,
    unfit: Sequence[str] = (),
    *,
    counts_required: bool = True,
    min_rounds: int = MIN_ROUNDS,
) -> Judgement:
    """The verdict of `overhead`.

    Order, the first that applies: incomplete set (exit 5); losses differ or a counter not armed (4); an exact
    count rose (1); machine unfit or A/A failed (4); over (1); slower or unresolved (3); within (0). An exact
    count outweighs an unfit machine because no machine's noise can raise it.

    Args:
        unfit: what `machine.unfit` says.
        counts_required: a run without exact counts is incomplete.
        min_rounds: fewer whole rounds make the set incomplete.
    """
    budgets = budgets or Budgets()
    incomplete = _incomplete(analysis, counts_required, min_rounds)
    invalid = _not_comparable(analysis)
    unsteady = [*unfit, *_aa_failed(analysis.aa, budgets)]
    limit = budgets.collector_percent
    blamed = _Blamed(
        over=_above(analysis.collectors, limit),
        slower=_above(analysis.collectors, 0.0),
        faster=_far_below(analysis.collectors, -limit),
    )
    costs = tuple(_cost(e, budgets.collector_percent, bool(unsteady), blamed) for e in analysis.collectors)
    everything = (
        None if analysis.all is None else _cost(analysis.all, budgets.all_percent, bool(unsteady), None)
    )
    verdict, code, reasons = _whole(costs, everything, budgets, incomplete, invalid, unsteady)
    return Judgement(verdict, code, tuple(dict.fromkeys(reasons)), costs, everything)


def _whole(
    costs: Sequence[Cost],
    everything: Cost | None,
    budgets: Budgets,
    incomplete: Sequence[str],
    invalid: Sequence[str],
    unsteady: Sequence[str],
) -> tuple[Verdict, ExitCode, list[str]]:
    every = [*costs, *([everything] if everything else [])]
    rises = [f"{cost.name}: {text}" for cost in every for text in _rises(_added(cost))]
    rest = [*incomplete, *invalid, *rises, *unsteady]
    for reasons, verdict, code in (
        (incomplete, Verdict.INVALID, ExitCode.INCOMPLETE),
        (invalid, Verdict.INVALID, ExitCode.INVALID),
        (rises, Verdict.OVER, ExitCode.OVER),
        (unsteady, Verdict.INVALID, ExitCode.INVALID),
    ):
        if reasons:
            return verdict, code, rest
    verdict = worst(cost.verdict for cost in every)
    said = [f"{cost.name}: {text}" for cost in every if cost.verdict is verdict for text in cost.reasons]
    if verdict is Verdict.WITHIN:
        each = f", each collector less than {budgets.collector_percent:g}%" if costs else ""
        said = [f"all together cost less than {budgets.all_percent:g}%{each}"]
    return verdict, CODES[verdict], said


SEVERITY: Final = (
    Verdict.WITHIN,
    Verdict.UNRESOLVED,
    Verdict.SLOWER,
    Verdict.NO_BASELINE,
    Verdict.INVALID,
    Verdict.OVER,
)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Intersection-union: `within` only when all are; of nothing, `invalid`."""
    return max(verdicts, key=SEVERITY.index, default=Verdict.INVALID)


def _incomplete(analysis: Analysis, counts_required: bool, min_rounds: int) -> list[str]:
    reasons = list(analysis.faults)
    if not analysis.collectors and not analysis.together:
        reasons.append("incomplete: the plan holds no collector")
    if analysis.all is None:
        reasons.append("incomplete: the plan holds no arm 'all'")
    if not analysis.has_aa:
        reasons.append("incomplete: the plan holds no A/A arm 'off-again'")
    reasons += [f"incomplete: arm {name!r} was not measured" for name in analysis.missing]
    if analysis.rounds < min_rounds:
        reasons.append(f"incomplete: {analysis.rounds} whole rounds, at least {min_rounds} are needed")
    reasons += [f"incomplete: {e.name} has no interval" for e in analysis.collectors if e.isolated is None]
    if counts_required and not analysis.counted:
        reasons.append("incomplete: exact counts were not taken")
    return reasons


def _not_comparable(analysis: Analysis) -> list[str]:
    reasons: list[str] = []
    if analysis.losses_equal is not True:
        reasons += analysis.loss_notes or ["no losses were recorded"]
    for evidence in (*analysis.collectors, *([analysis.all] if analysis.all else [])):
        if evidence.count_fault:
            reasons.append(evidence.count_fault)
    return reasons


def _aa_failed(aa: Interval | None, budgets: Budgets) -> list[str]:
    """off-again against off: clearly different, and by enough to matter."""
    if aa is None or aa.p_two_sided is None:
        return []
    if aa.p_two_sided < AA_ALPHA and abs(aa.percent) > AA_SHARE * budgets.collector_percent:
        return [
            f"A/A failed: 'off-again' differs from 'off' by {aa.percent:+.2f}% (p = {aa.p_two_sided:.2g})"
        ]
    return []


@dataclass(frozen=True, slots=True)
class _Blamed:
    """Collectors that are over budget, slower at all, or faster than can be, once corrected for the number of
    contrasts."""

    over: frozenset[str]
    slower: frozenset[str]
    faster: frozenset[str]


def _above(evidence: Sequence[CollectorEvidence], percent: float) -> frozenset[str]:
    """Collectors with a contrast above `percent` after Holm's correction over all contrasts."""
    p_values = {
        f"{e.name} {kind}": p_over(found, percent)
        for e in evidence
        for kind, found in (("isolated", e.isolated), ("marginal", e.marginal))
        if found is not None
    }
    return frozenset(name.rsplit(" ", 1)[0] for name, p in holm(p_values).items() if p <= NOMINAL)


def _far_below(evidence: Sequence[CollectorEvidence], percent: float) -> frozenset[str]:
    """Collectors whose own contrast is below `percent` for as good as sure."""
    p_values = {e.name: p_under(e.isolated, percent) for e in evidence if e.isolated is not None}
    return frozenset(name for name, p in holm(p_values).items() if p <= AA_ALPHA)


def _cost(
    evidence: CollectorEvidence,
    budget_percent: float,
    unsteady: bool,
    blamed: _Blamed | None,
    *,
    may_be_faster: bool = False,
) -> Cost:
    verdict, reasons = _judge_one(evidence, budget_percent, unsteady, blamed, may_be_faster)
    added = evidence.added or {}
    return Cost(
        name=evidence.name,
        isolated=evidence.isolated,
        marginal=evidence.marginal,
        accounted_percent=evidence.accounted_percent,
        syncs_added=added.get("syncs"),
        operations_added=added.get("operations"),
        copies_added=added.get("copies"),
        allocations_added=added.get("allocations"),
        verdict=verdict,
        reasons=tuple(reasons),
    )


def _judge_one(
    evidence: CollectorEvidence,
    budget_percent: float,
    unsteady: bool,
    blamed: _Blamed | None,
    may_be_faster: bool,
) -> tuple[Verdict, list[str]]:
    """Verdict of one collector, or of "all" (`blamed` None: its one contrast needs no correction).

    A collector that makes training faster by more than its budget is a fault; between two commits faster is
    good news."""
    if evidence.count_fault:
        return Verdict.INVALID, [evidence.count_fault]
    if evidence.losses_differ:
        return Verdict.INVALID, ["it changes the losses"]
    rises = _rises(evidence.added or {})
    if rises:
        return Verdict.OVER, rises
    isolated = evidence.isolated
    if isolated is None:
        return Verdict.INVALID, ["not measured"]
    if unsteady:
        return Verdict.INVALID, ["the machine or the A/A arm was unfit"]
    faster = (
        p_under(isolated, -budget_percent) <= AA_ALPHA if blamed is None else evidence.name in blamed.faster
    )
    if faster and not may_be_faster:
        return Verdict.INVALID, [
            f"faster by {-isolated.percent:.2f}% when on: it cannot be doing the same work"
        ]
    return _judge_timing(evidence, isolated, budget_percent, blamed)


def _judge_timing(
    evidence: CollectorEvidence, isolated: Interval, budget_percent: float, blamed: _Blamed | None
) -> tuple[Verdict, list[str]]:
    both = [("alone", isolated)]
    if evidence.marginal is not None and blamed is not None:
        both.append(("on top of the others", evidence.marginal))
    for where, found in both:
        if classify(found, budget_percent) is Verdict.OVER:
            text = f"{where} it costs {_range(found)}, budget {budget_percent:g}%"
            if blamed is None or evidence.name in blamed.over:
                return Verdict.OVER, [text]
            verdict = Verdict.SLOWER if evidence.name in blamed.slower else Verdict.UNRESOLVED
            return verdict, [f"{text}; {CORRECTED}"]
    verdict = classify(isolated, budget_percent)
    if verdict is Verdict.WITHIN:
        accounted = evidence.accounted_percent
        if accounted is not None and accounted > budget_percent:
            return Verdict.SLOWER, [
                f"its own code takes {accounted:.2f}% of the step, budget {budget_percent:g}%"
            ]
        return verdict, [f"at most {isolated.high:.2f}%, budget {budget_percent:g}%"]
    if isolated.high < budget_percent and not precise(isolated, budget_percent):
        return verdict, [
            f"not resolved: {_range(isolated)} is under the budget by luck, as no cost is below zero"
        ]
    if isolated.high < budget_percent:
        return verdict, [
            f"not resolved: middle steps lose at most {isolated.high:.2f}%, but whole segments "
            f"{isolated.plain_percent:.2f}%: the cost may fall on few steps"
        ]
    if verdict is Verdict.SLOWER and blamed is not None and evidence.name not in blamed.slower:
        return Verdict.UNRESOLVED, [f"slower by {_range(isolated)}; {CORRECTED}"]
    if verdict is Verdict.SLOWER:
        return verdict, [
            f"slower by {_range(isolated)}, not resolved against the budget of {budget_percent:g}%"
        ]
    return verdict, [
        f"not resolved: {_range(isolated)}, budget {budget_percent:g}%; smallest cost found: "
        f"{isolated.mde:.2f}%"
    ]


def _range(found: Interval) -> str:
    return f"{found.percent:.2f}% ({found.low:.2f} to {found.high:.2f})"


def _rises(added: Mapping[str, int | None]) -> list[str]:
    return [
        f"{kind} rose by {count}"
        for kind in COUNT_KINDS
        if (count := added.get(kind)) is not None and count > 0
    ]


def _added(cost: Cost) -> dict[str, int | None]:
    return {kind: getattr(cost, f"{kind}_added") for kind in COUNT_KINDS}


def judge_pair(
    found: Interval | None,
    budget_percent: float,
    *,
    added: Mapping[str, int | None] | None = None,
    incomplete: Sequence[str] = (),
    not_comparable: Sequence[str] = (),
    unfit: Sequence[str] = (),
    name: str = ALL,
) -> Judgement:
    """The verdict of one contrast (`gate`: head against base), by the same order as `judge`."""
    if found is None:
        incomplete = (*incomplete, "incomplete: no interval, fewer than two whole rounds")
    evidence = CollectorEvidence(name, found, found, added=dict(added or {}))
    cost = _cost(evidence, budget_percent, bool(unfit), None, may_be_faster=True)
    budgets = Budgets(budget_percent, budget_percent)
    verdict, code, reasons = _whole([], cost, budgets, incomplete, not_comparable, unfit)
    if verdict is Verdict.WITHIN and found is not None:
        reasons = [f"{_range(found)} against a budget of {budget_percent:g}%"]
    return Judgement(verdict, code, tuple(dict.fromkeys(reasons)), (), cost)
