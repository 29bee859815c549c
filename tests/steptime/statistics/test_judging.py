"""Every rule of the verdict, one row each, and a planted fault for each way of being red."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steptime.records.costs import Estimate
from steptime.records.types import ExitCode, Verdict
from steptime.statistics.judging import Budgets, Evidence, Judgement, judge, judge_gate
from steptime.statistics.one_switch import Observed, holm

CLEAN: dict[str, int | None] = {"syncs": 0, "operations": 0, "copies": 0, "allocations": None}


def estimate(percent: float = 0.0, half: float = 0.3, budget: float = 1.0) -> Estimate:
    """A cost whose p-values are those of a normal estimate with this half-width."""
    from scipy.stats import norm

    error = half / 1.645

    def p(distance: float) -> float:
        return float(norm.sf(distance / error))

    return Estimate(
        percent,
        percent - half,
        percent + half,
        error,
        3.29 * error,
        p(percent),
        p(-percent),
        p(percent - budget),
        p(-budget - percent),
        200,
    )


def observed(name: str, percent: float = 0.0, half: float = 0.3, **more: object) -> Observed:
    budget = 1.0 if name in ("all", "head") else 0.5
    fields = {"accounted_percent": 0.02, "added": CLEAN, **more}
    return Observed(name, estimate(percent, half, budget), **fields)  # type: ignore[arg-type]


def evidence(**changes: object) -> Evidence:
    base = Evidence(
        collectors=(observed("batch"), observed("losses")),
        all=observed("all", accounted_percent=0.08),
        minutes=4.0,
        losses_equal=True,
        counted=True,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def test_clean_evidence_is_within_and_says_the_bound() -> None:
    found = judge(evidence())
    assert (found.verdict, found.exit_code) == (Verdict.WITHIN, ExitCode.WITHIN)
    assert [cost.verdict for cost in found.collectors] == [Verdict.WITHIN] * 2
    assert found.headline == (
        "All together: a cost of less than 0.3%; no count rose; losses are equal; their own code takes 0.08%."
    )


def test_a_collector_that_is_not_proven_within_holds_nothing_back_and_says_its_minutes() -> None:
    found = judge(evidence(collectors=(observed("batch", 0.2, 0.8), observed("losses"))))
    assert found.exit_code is ExitCode.WITHIN
    batch = found.collectors[0]
    assert batch.verdict is Verdict.UNRESOLVED
    assert batch.minutes_to_settle == pytest.approx(4.0 * (2 * 0.8 / 0.5) ** 2, rel=0.02)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("changes", "verdict", "code", "says"),
    [
        # What is missing
        ({"incomplete": ("6 pairs of flush",)}, Verdict.INVALID, ExitCode.INCOMPLETE, "6 pairs"),
        ({"collectors": ()}, Verdict.INVALID, ExitCode.INCOMPLETE, "no collector"),
        ({"all": None}, Verdict.INVALID, ExitCode.INCOMPLETE, "for all"),
        (
            {"collectors": (Observed("batch", None, added=CLEAN),)},
            Verdict.INVALID,
            ExitCode.INCOMPLETE,
            "for batch",
        ),
        ({"counted": False}, Verdict.INVALID, ExitCode.INCOMPLETE, "counts were not taken"),
        # Work that differs
        (
            {"losses_equal": False, "loss_notes": ("step 3 differs",)},
            Verdict.INVALID,
            ExitCode.INVALID,
            "step 3",
        ),
        ({"losses_equal": None}, Verdict.INVALID, ExitCode.INVALID, "no losses"),
        (
            {"collectors": (observed("batch", count_fault="not armed"),)},
            Verdict.INVALID,
            ExitCode.INVALID,
            "not armed",
        ),
        (
            {"collectors": (observed("batch", added=CLEAN | {"operations": -768}),)},
            Verdict.INVALID,
            ExitCode.INVALID,
            "batch: operations fell by 768",
        ),
        (
            {"all": observed("all", added=CLEAN | {"syncs": -1})},
            Verdict.INVALID,
            ExitCode.INVALID,
            "all: syncs fell",
        ),
        # Counts
        (
            {"collectors": (observed("batch", added=CLEAN | {"syncs": 8}),)},
            Verdict.OVER,
            ExitCode.OVER,
            "batch: syncs rose by 8",
        ),
        (
            {"all": observed("all", added=CLEAN | {"operations": 1})},
            Verdict.OVER,
            ExitCode.OVER,
            "all: operations rose",
        ),
        # Times
        ({"all": observed("all", 1.5)}, Verdict.OVER, ExitCode.OVER, "all: it costs 1.50%"),
        (
            {"collectors": (observed("batch", 1.5), observed("losses"))},
            Verdict.OVER,
            ExitCode.OVER,
            "batch: it costs",
        ),
        ({"all": observed("all", 0.9)}, Verdict.SLOWER, ExitCode.UNRESOLVED, "all: slower by 0.90%"),
        ({"all": observed("all", 0.3, 0.9)}, Verdict.UNRESOLVED, ExitCode.UNRESOLVED, "all: not resolved"),
        ({"all": observed("all", -5.0, 4.0)}, Verdict.UNRESOLVED, ExitCode.UNRESOLVED, "by luck"),
        ({"all": observed("all", -3.0)}, Verdict.INVALID, ExitCode.INVALID, "all: faster by 3.00%"),
        ({"collectors": (observed("batch", -3.0),)}, Verdict.INVALID, ExitCode.INVALID, "batch: faster by"),
        # Its own code
        (
            {"all": observed("all", accounted_percent=1.4)},
            Verdict.SLOWER,
            ExitCode.UNRESOLVED,
            "its own code takes 1.40%",
        ),
        (
            {"collectors": (observed("batch", accounted_percent=0.6),)},
            Verdict.SLOWER,
            ExitCode.UNRESOLVED,
            "batch: its own code takes 0.60%",
        ),
    ],
)
def test_every_way_of_not_being_green(
    changes: dict[str, object], verdict: Verdict, code: ExitCode, says: str
) -> None:
    found = judge(evidence(**changes))
    assert (found.verdict, found.exit_code) == (verdict, code)
    assert says in " | ".join(found.reasons)
    assert found.headline
    assert not found.headline.startswith("All together: a cost of less")


@pytest.mark.fault
def test_an_unfit_machine_says_nothing_of_times_but_a_count_outweighs_it() -> None:
    found = judge(evidence(all=observed("all", 9.0)), unfit=["a GPU throttled"])
    assert (found.verdict, found.exit_code) == (Verdict.INVALID, ExitCode.INVALID)
    assert found.headline == "No answer: a GPU throttled."
    risen = evidence(all=observed("all", added=CLEAN | {"syncs": 2}))
    assert judge(risen, unfit=["a GPU throttled"]).exit_code is ExitCode.OVER


def test_the_order_of_reasons() -> None:
    """incomplete, then work that differs, then counts, then the machine: the first decides, all are said."""
    batch = observed("batch", added=CLEAN | {"syncs": 8})
    told = evidence(incomplete=("crashed",), losses_equal=False, loss_notes=("losses",), collectors=(batch,))
    found = judge(told, unfit=["hot"])
    assert found.exit_code is ExitCode.INCOMPLETE
    assert found.reasons == ("crashed", "losses", "batch: syncs rose by 8", "hot")
    assert judge(replace(told, incomplete=()), unfit=["hot"]).exit_code is ExitCode.INVALID
    equal = replace(told, incomplete=(), losses_equal=True, loss_notes=())
    assert judge(equal, unfit=["hot"]).exit_code is ExitCode.OVER


def test_blame_is_corrected_for_how_many_are_asked() -> None:
    """p = 0.005 names one collector, and not one of six."""
    seen = observed("batch", 1.09, 0.377)  # 2.58 standard errors over its budget
    assert judge(evidence(collectors=(seen,))).exit_code is ExitCode.OVER
    five = tuple(observed(name) for name in "abcde")
    found = judge(evidence(collectors=(seen, *five)))
    assert found.exit_code is ExitCode.WITHIN
    assert found.collectors[0].verdict is Verdict.SLOWER
    assert holm({"a": 0.01, "b": 0.02, "c": 0.5}) == {
        "a": pytest.approx(0.03),
        "b": pytest.approx(0.04),
        "c": 0.5,
    }


def test_what_is_open_is_told_with_what_is_excluded_and_the_minutes() -> None:
    found = judge(evidence(all=observed("all", 0.2, 0.87, accounted_percent=0.08)))
    assert found.headline == (
        "All together: a cost of more than 1.1% is excluded; no count rose; losses are equal; their own code "
        "takes 0.08%. 8 more minutes of this machine would settle the budget of 1%."
    )
    together = judge(evidence(collectors=(), only_together=True))
    assert together.exit_code is ExitCode.WITHIN


def test_what_was_let_through_is_told() -> None:
    found = judge(evidence(accepted=("losses may change (new loss)",)))
    assert found.exit_code is ExitCode.WITHIN
    assert found.accepted == ("losses may change (new loss)",)


def test_budgets_of_ones_own() -> None:
    dear = observed("all", 1.5)
    found = replace(dear, estimate=estimate(1.5, 0.3, budget=3.0))
    assert judge(evidence(all=found), Budgets(3.0, 3.0)).exit_code is ExitCode.WITHIN


def gate(found: Estimate | None, **more: object) -> Judgement:
    return judge_gate(found, 1.0, **{"minutes": 10.0, "launches": 8, "added": CLEAN, **more})  # type: ignore[arg-type]


@pytest.mark.fault
@pytest.mark.parametrize(
    ("percent", "half", "more", "verdict", "code", "says"),
    [
        (0.0, 0.3, {}, Verdict.WITHIN, ExitCode.WITHIN, "at most 0.30%"),
        (-3.0, 0.3, {}, Verdict.WITHIN, ExitCode.WITHIN, "at most"),
        (1.5, 0.3, {}, Verdict.OVER, ExitCode.OVER, "1.50% (1.20 to 1.80)"),
        (0.9, 0.3, {}, Verdict.SLOWER, ExitCode.UNRESOLVED, "slower by"),
        (0.5, 0.9, {}, Verdict.UNRESOLVED, ExitCode.UNRESOLVED, "not resolved"),
        (0.0, 0.3, {"added": CLEAN | {"syncs": 1}}, Verdict.OVER, ExitCode.OVER, "syncs rose by 1"),
        (0.0, 0.3, {"added": CLEAN | {"operations": -9}}, Verdict.WITHIN, ExitCode.WITHIN, "at most"),
        (0.0, 0.3, {"not_comparable": ["losses"]}, Verdict.INVALID, ExitCode.INVALID, "losses"),
        (0.0, 0.3, {"incomplete": ["crash"]}, Verdict.INVALID, ExitCode.INCOMPLETE, "crash"),
        (0.0, 0.3, {"unfit": ["hot"]}, Verdict.INVALID, ExitCode.INVALID, "hot"),
        (0.0, 0.3, {"memory_rise": "memory rose"}, Verdict.OVER, ExitCode.OVER, "memory rose"),
    ],
)
def test_every_rule_of_a_gate(
    percent: float, half: float, more: dict[str, object], verdict: Verdict, code: ExitCode, says: str
) -> None:
    found = gate(estimate(percent, half), **more)
    assert (found.verdict, found.exit_code) == (verdict, code)
    assert says in " | ".join(found.reasons)


@pytest.mark.fault
def test_a_gate_of_few_launches_says_so_and_one_whose_work_differs_says_that() -> None:
    few = gate(None, launches=5)
    assert few.exit_code is ExitCode.INCOMPLETE
    assert "5 whole launches; at least 7" in few.headline
    differs = gate(None, not_comparable=["losses differ at step 3"])
    assert (differs.exit_code, differs.reasons) == (ExitCode.INVALID, ("losses differ at step 3",))


def test_good_news_is_told() -> None:
    found = gate(estimate(-3.0, 0.3), added=CLEAN | {"operations": -9})
    assert found.headline == ("Head: a cost of less than 0.0%; it is faster by 3.00%; 9 fewer operations.")
