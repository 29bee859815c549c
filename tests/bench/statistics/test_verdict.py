"""Every rule of the verdict, one row each, and a planted fault for each way of being red."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from bench.records.types import ALL, OFF_AGAIN, Arm, ExitCode, Interval, Measurement, Throughput, Verdict
from bench.statistics.analysis import Analysis, CollectorEvidence, analyse
from bench.statistics.contrasts import collect
from bench.statistics.intervals import interval as interval_of
from bench.statistics.verdict import Budgets, classify, judge, judge_pair, worst
from tests.bench.make import COLLECTORS, counts, interval, measurement

CLEAN = {"syncs": 0, "operations": 0, "copies": 0, "allocations": None}


@pytest.mark.parametrize(
    ("percent", "low", "high", "verdict"),
    [
        (0.0, -0.3, 0.3, Verdict.WITHIN),
        (0.0, -0.3, 0.999, Verdict.WITHIN),
        (0.4, 0.1, 0.7, Verdict.WITHIN),  # slower for sure, and within for sure: the budget is kept
        (0.0, -0.3, 1.0, Verdict.UNRESOLVED),  # U < budget is strict
        (0.5, -0.3, 1.3, Verdict.UNRESOLVED),
        (0.7, 0.1, 1.3, Verdict.SLOWER),
        (1.5, 1.0, 2.0, Verdict.SLOWER),  # L > budget is strict
        (1.6, 1.1, 2.1, Verdict.OVER),
        (-3.0, -3.5, -2.5, Verdict.WITHIN),
    ],
)
def test_one_interval_against_a_budget_of_one_percent(
    percent: float, low: float, high: float, verdict: Verdict
) -> None:
    assert classify(interval(percent, low, high), 1.0) is verdict


def test_nothing_is_slower_unless_the_sign_flip_agrees() -> None:
    assert classify(interval(1.6, 1.1, 2.1, p=0.2), 1.0) is Verdict.UNRESOLVED
    assert classify(interval(0.7, 0.1, 1.3, p=0.2), 1.0) is Verdict.UNRESOLVED
    # With four processes 2^-4 is the least p there is: the cross-check cannot speak.
    assert classify(interval(1.6, 1.1, 2.1, n=4, p=0.0625), 1.0) is Verdict.OVER


@pytest.mark.fault
def test_within_needs_a_run_that_could_have_said_otherwise() -> None:
    """Under the budget only for an estimate that no cost can have."""
    assert classify(interval(-3.7, -7.4, 0.48), 0.5) is Verdict.UNRESOLVED
    assert classify(interval(-0.1, -0.5, 0.3), 0.5) is Verdict.WITHIN
    # A ceiling takes the estimate down to the bound with it, and is precise by itself.
    assert classify(replace(interval(0.3, -4.0, 0.3), ceiling_percent=0.1), 0.5) is Verdict.WITHIN


def test_within_needs_whole_segments_to_agree() -> None:
    quiet = replace(interval(0.0, -0.2, 0.2), plain_percent=1.9)
    assert classify(quiet, 1.0) is Verdict.UNRESOLVED
    assert classify(replace(quiet, ceiling_percent=0.1), 1.0) is Verdict.WITHIN


def analysis(**changes: object) -> Analysis:
    """A clean analysis of two collectors."""
    small = interval(0.02, -0.1, 0.15)
    evidence = tuple(CollectorEvidence(name, small, small, 0.01, dict(CLEAN)) for name in COLLECTORS)
    clean = Analysis(
        collectors=evidence,
        all=CollectorEvidence(ALL, small, small, 0.02, dict(CLEAN)),
        aa=replace(interval(0.0, -0.1, 0.1), p_two_sided=0.9),
        throughput=Throughput(1000.0, 990.0, 1010.0),
        rounds=12,
        missing=(),
        losses_equal=True,
        loss_notes=(),
        counted=True,
        has_aa=True,
    )
    return replace(clean, **changes)  # type: ignore[arg-type]


def first(**changes: object) -> tuple[CollectorEvidence, ...]:
    """The collectors, the first of them changed."""
    one, *rest = analysis().collectors
    return (replace(one, **changes), *rest)  # type: ignore[arg-type]


W, O, S, U, I = Verdict.WITHIN, Verdict.OVER, Verdict.SLOWER, Verdict.UNRESOLVED, Verdict.INVALID  # noqa: E741
RUNS: list[tuple[str, dict[str, object], list[str], Verdict, int, str]] = [
    ("clean", {}, [], W, 0, "all together cost less than 1%"),
    (
        "a collector over",
        {"collectors": first(isolated=interval(0.8, 0.6, 1.0))},
        [],
        O,
        1,
        "profile: alone it costs 0.80%",
    ),
    (
        "all over",
        {"all": CollectorEvidence(ALL, interval(1.5, 1.2, 1.8), None, 0.0, CLEAN)},
        [],
        O,
        1,
        "all: alone it costs",
    ),
    (
        "over only beside the others",
        {"collectors": first(marginal=interval(0.8, 0.6, 1.0))},
        [],
        O,
        1,
        "on top of the others",
    ),
    ("slower", {"collectors": first(isolated=interval(0.5, 0.3, 0.7))}, [], S, 3, "profile: slower by 0.50%"),
    (
        "slower by a hair",
        {"collectors": first(isolated=interval(0.4, 0.1, 0.7))},
        [],
        U,
        3,
        "not proven once corrected",
    ),
    ("unresolved", {"collectors": first(isolated=interval(0.1, -0.5, 0.7))}, [], U, 3, "smallest cost found"),
    (
        "its own code over budget",
        {"collectors": first(accounted_percent=0.7)},
        [],
        S,
        3,
        "its own code takes 0.70%",
    ),
    ("one sync", {"collectors": first(added=CLEAN | {"syncs": 1})}, [], O, 1, "profile: syncs rose by 1"),
    (
        "one operation",
        {"collectors": first(added=CLEAN | {"operations": 1})},
        [],
        O,
        1,
        "operations rose by 1",
    ),
    ("one copy", {"collectors": first(added=CLEAN | {"copies": 3})}, [], O, 1, "copies rose by 3"),
    (
        "one allocation",
        {"collectors": first(added=CLEAN | {"allocations": 1})},
        [],
        O,
        1,
        "allocations rose by 1",
    ),
    ("fewer syncs", {"collectors": first(added=CLEAN | {"syncs": -2})}, [], W, 0, "all together"),
    ("losses differ", {"losses_equal": False, "loss_notes": ("arm x differs",)}, [], I, 4, "arm x differs"),
    ("no losses", {"losses_equal": None}, [], I, 4, "no losses were recorded"),
    ("counter not armed", {"collectors": first(added=None, count_fault="not armed")}, [], I, 4, "not armed"),
    ("unfit", {}, ["GPU 0 was throttled"], I, 4, "GPU 0 was throttled"),
    (
        "faster by magic",
        {"collectors": first(isolated=interval(-2.0, -2.5, -1.5))},
        [],
        I,
        4,
        "cannot be doing the same work",
    ),
    ("faster by chance", {"collectors": first(isolated=interval(-11.8, -20.3, -2.4))}, [], U, 3, "by luck"),
    ("missing arm", {"missing": ("only:profile",)}, [], I, 5, "arm 'only:profile' was not measured"),
    ("crash", {"faults": ("trainer crashed",)}, [], I, 5, "trainer crashed"),
    ("too few rounds", {"rounds": 7}, [], I, 5, "7 whole rounds"),
    ("no collectors", {"collectors": ()}, [], I, 5, "no collector"),
    ("no arm all", {"all": None}, [], I, 5, "no arm 'all'"),
    ("no A/A arm", {"has_aa": False}, [], I, 5, "no A/A arm"),
    ("no counts", {"counted": False}, [], I, 5, "exact counts were not taken"),
    ("no interval", {"collectors": first(isolated=None)}, [], I, 5, "profile has no interval"),
    ("A/A failed", {"aa": replace(interval(0.4, 0.3, 0.5), p_two_sided=0.001)}, [], I, 4, "A/A failed"),
    (
        "A/A differs by nothing that matters",
        {"aa": replace(interval(0.1, 0.08, 0.12), p_two_sided=1e-6)},
        [],
        W,
        0,
        "",
    ),
    ("A/A differs by chance", {"aa": replace(interval(0.4, 0.1, 0.7), p_two_sided=0.02)}, [], W, 0, ""),
]


@pytest.mark.parametrize(
    ("changes", "unfit", "verdict", "code", "reason"), [row[1:] for row in RUNS], ids=[row[0] for row in RUNS]
)
def test_run(changes: dict[str, object], unfit: list[str], verdict: Verdict, code: int, reason: str) -> None:
    found = judge(analysis(**changes), unfit=unfit)
    assert (found.verdict, int(found.exit_code)) == (verdict, code), found.reasons
    assert reason in "; ".join(found.reasons)


def test_order_of_the_faults() -> None:
    """A sync added shows through an unfit machine, but not through an incomplete set or unequal work."""
    sync = {"collectors": first(added=CLEAN | {"syncs": 1})}
    assert judge(analysis(**sync), unfit=["throttled"]).exit_code is ExitCode.OVER
    assert judge(analysis(**sync, losses_equal=False)).exit_code is ExitCode.INVALID
    assert judge(analysis(**sync, losses_equal=False, missing=("all",))).exit_code is ExitCode.INCOMPLETE


def test_blame_is_corrected_for_the_number_of_contrasts() -> None:
    """L > budget by a hair in one of many: red all the same, but nobody is called guilty."""
    edge = interval(0.8, 0.51, 1.09)
    alone = judge(analysis(collectors=(CollectorEvidence("a", edge, None, 0.0, CLEAN),)))
    fine = interval(0.02, -0.1, 0.15)
    many = tuple(
        CollectorEvidence(name, edge if name == "a" else fine, fine, 0.0, CLEAN) for name in "abcdefgh"
    )
    crowd = judge(analysis(collectors=many))
    assert (alone.collectors[0].verdict, alone.exit_code) == (Verdict.OVER, ExitCode.OVER)
    assert (crowd.collectors[0].verdict, crowd.exit_code) == (Verdict.SLOWER, ExitCode.UNRESOLVED)
    assert "number of contrasts" in crowd.collectors[0].reasons[0]


@pytest.mark.slow
def test_nobody_is_called_slower_by_chance_in_more_runs_than_promised() -> None:
    """Six collectors that cost nothing, twelve contrasts: uncorrected, four runs of ten would call one of
    them slower."""
    generator = np.random.default_rng(3)
    runs, alarms, uncorrected = 200, 0, 0
    for _ in range(runs):
        noise = [
            interval_of(collect((0, (value, np.nan, np.nan)) for value in row))
            for row in generator.normal(0, 0.01, (12, 14))
        ]
        crowd = tuple(
            CollectorEvidence(f"c{i}", noise[2 * i], noise[2 * i + 1], 0.0, CLEAN) for i in range(6)
        )
        alarms += judge(analysis(collectors=crowd)).verdict in (S, O)
        uncorrected += any(found is not None and found.low > 0 for found in noise)
    assert alarms <= 0.05 * runs + 2 * (0.05 * 0.95 * runs) ** 0.5
    assert uncorrected > 0.3 * runs, "the correction has nothing to do here"


def test_budgets_are_the_callers() -> None:
    found = judge(analysis(), Budgets(0.1, 0.1))
    assert found.verdict is Verdict.UNRESOLVED


def test_worst_of_nothing_is_not_green() -> None:
    assert worst([]) is Verdict.INVALID
    assert worst([Verdict.WITHIN, Verdict.SLOWER, Verdict.UNRESOLVED]) is Verdict.SLOWER


PAIRS: list[tuple[str, Interval | None, dict[str, object], Verdict, int]] = [
    ("within", interval(0.1, -0.2, 0.4), {}, W, 0),
    ("over", interval(2.0, 1.6, 2.4), {}, O, 1),
    ("slower", interval(0.9, 0.5, 1.3), {}, S, 3),
    ("unresolved", interval(0.3, -0.6, 1.2), {}, U, 3),
    ("faster commit", interval(-5.0, -5.5, -4.5), {}, W, 0),
    ("losses", interval(0.1, -0.2, 0.4), {"not_comparable": ["step 3 differs"]}, I, 4),
    ("unfit", interval(0.1, -0.2, 0.4), {"unfit": ["shared"]}, I, 4),
    ("a sync more", interval(0.1, -0.2, 0.4), {"added": CLEAN | {"syncs": 1}}, O, 1),
    ("nothing measured", None, {}, I, 5),
    ("crashed", interval(0.1, -0.2, 0.4), {"incomplete": ["head crashed"]}, I, 5),
]


@pytest.mark.parametrize(
    ("found", "more", "verdict", "code"), [row[1:] for row in PAIRS], ids=[row[0] for row in PAIRS]
)
def test_pair_of_commits(
    found: Interval | None, more: dict[str, object], verdict: Verdict, code: int
) -> None:
    judged = judge_pair(found, 1.0, **more)  # type: ignore[arg-type]
    assert (judged.verdict, int(judged.exit_code)) == (verdict, code)
    assert judged.reasons


# From segments to exit code: the whole way, with a planted fault each time.


def without_arm(m: Measurement) -> Measurement:
    return replace(m, segments=tuple(s for s in m.segments if s.arm != "only:profile"))


def deselected(m: Measurement) -> Measurement:
    return replace(m, arms=tuple(a for a in m.arms if a.name != OFF_AGAIN))


def crashed(m: Measurement) -> Measurement:
    return replace(m, segments=m.segments[:20], faults=("trainer crashed after 20 segments",))


def other_losses(m: Measurement) -> Measurement:
    changed = [replace(s, losses_digest="other") if s.arm == "all" else s for s in m.segments]
    return replace(m, segments=tuple(changed))


def lost_losses(m: Measurement) -> Measurement:
    return replace(m, segments=tuple(replace(s, losses_digest="") for s in m.segments))


def unarmed(m: Measurement) -> Measurement:
    broken = dict(m.counts)
    broken["only:pipeline"] = replace(
        broken["only:pipeline"], armed=False, unavailable=("dispatch: not installed",)
    )
    return replace(m, counts=broken)


def uncounted_arm(m: Measurement) -> Measurement:
    return replace(m, counts={k: v for k, v in m.counts.items() if k != "only:pipeline"})


def other_way(m: Measurement) -> Measurement:
    return replace(m, counts=dict(m.counts) | {"all": replace(m.counts["all"], ways=("cupti",))})


def fewer_steps(m: Measurement) -> Measurement:
    return replace(m, counts=dict(m.counts) | {"all": replace(m.counts["all"], steps=4)})


def added_sync(m: Measurement) -> Measurement:
    return replace(m, counts=counts(m.arms, profile=1))


def slow_aa(m: Measurement) -> Measurement:
    slow = [
        replace(s, step_seconds=tuple(1.01 * t for t in s.step_seconds), seconds=1.01 * s.seconds)
        for s in m.segments
    ]
    return replace(
        m, segments=tuple(b if a.arm == OFF_AGAIN else a for a, b in zip(m.segments, slow, strict=True))
    )


def empty_plan(m: Measurement) -> Measurement:
    return replace(m, arms=(), collectors=(), segments=())


def extra_arm(m: Measurement) -> Measurement:
    return replace(m, arms=(*m.arms, Arm("only:gpu", frozenset({"gpu"}))))


FAULTS: list[tuple[Callable[[Measurement], Measurement], int, str]] = [
    (without_arm, 5, "arm 'only:profile' was not measured"),
    (deselected, 5, "no A/A arm"),
    (crashed, 5, "crashed after 20 segments"),
    (other_losses, 4, "the losses of arm 'all' are not those of 'off'"),
    (lost_losses, 4, "no losses were recorded for arm 'off'"),
    (unarmed, 4, "the counter of arm 'only:pipeline' was not armed: dispatch: not installed"),
    (uncounted_arm, 4, "exact counts of arm 'only:pipeline' are missing"),
    (other_way, 4, "counted by other ways"),
    (fewer_steps, 4, "counted over 4 steps"),
    (added_sync, 1, "profile: syncs rose by 1"),
    (slow_aa, 4, "A/A failed"),
    (empty_plan, 5, "the plan holds no collector"),
    (extra_arm, 5, "arm 'only:gpu' was not measured"),
]


@pytest.mark.parametrize(("fault", "code", "reason"), FAULTS, ids=[row[0].__name__ for row in FAULTS])
def test_planted_fault(fault: Callable[[Measurement], Measurement], code: int, reason: str) -> None:
    found = judge(analyse(fault(measurement())))
    assert int(found.exit_code) == code, found.reasons
    assert reason in "; ".join(found.reasons)


@pytest.mark.parametrize(
    ("costs", "code", "guilty"),
    [({}, 0, []), ({"profile": 0.02}, 1, ["profile", "all"]), ({"profile": 0.004, "pipeline": 0.004}, 0, [])],
)
def test_from_segments_to_exit_code(costs: dict[str, float], code: int, guilty: list[str]) -> None:
    found = judge(analyse(measurement(costs, noise=0.001)))
    assert int(found.exit_code) == code, found.reasons
    assert found.all is not None
    assert [c.name for c in (*found.collectors, found.all) if c.verdict is Verdict.OVER] == guilty


def test_costs_are_isolated_and_marginal() -> None:
    found = analyse(measurement({"profile": 0.02}))
    profile, pipeline = found.collectors
    assert profile.isolated is not None
    assert profile.marginal is not None
    assert profile.isolated.percent == pytest.approx(1.98, abs=0.3)
    assert profile.marginal.percent == pytest.approx(1.98, abs=0.3)
    assert pipeline.isolated is not None
    assert abs(pipeline.isolated.percent) < 0.3
    assert found.rounds == 12
    assert found.losses_equal is True
