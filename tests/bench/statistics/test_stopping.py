"""When measuring stops, and that stopping keeps the error rates: simulated with fixed seeds."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from bench.records.types import Verdict, log_ratio
from bench.selfcheck.simulate import (
    CAP,
    NOISES,
    SHARED,
    Cost,
    Rates,
    rates,
    report,
    run_rule,
    share,
    simulate,
    stopping_error,
)
from bench.statistics.contrasts import Rounds
from bench.statistics.estimates import estimate, estimate_units
from bench.statistics.intervals import NOMINAL
from bench.statistics.stopping import MIN_ROUNDS, StoppingRule, half_width, judged, looks
from tests.bench.make import measurement, segment

RUNS = 800


def watch(budget: float = 1.0) -> StoppingRule:
    return StoppingRule({"all": (("all",), ("off",))}, {"all": budget}, 8)


def feed(watched: StoppingRule, rounds: int, spread: float = 0.0, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for number in range(rounds):
        watched.add(
            [segment("off", number, 1.0), segment("all", number, float(np.exp(rng.normal(0, spread))))]
        )


def test_looks_are_few_and_end_at_the_last() -> None:
    assert list(islice(looks(), 7)) == [8, 12, 18, 27, 41, 62, 93]
    assert list(looks(last=30)) == [8, 12, 18, 27, 30]
    assert list(looks(last=8)) == [8]


def test_never_before_eight_rounds_even_out_of_time() -> None:
    watched = watch()
    feed(watched, MIN_ROUNDS - 1)
    assert not watched.decide(out_of_time=True).stop


def test_precise_enough_stops_at_a_look_only() -> None:
    watched = watch()
    feed(watched, MIN_ROUNDS)
    decision = watched.decide(out_of_time=False)
    assert (decision.stop, decision.why, decision.waiting) == (True, "clear", ())
    feed(watched, 1)
    assert not watched.decide(out_of_time=False).stop


def test_noise_goes_on_until_the_time_is_up_and_says_what_it_waits_for() -> None:
    watched = watch()
    feed(watched, 12, spread=0.05)
    going_on = watched.decide(out_of_time=False)
    assert not going_on.stop
    assert going_on.waiting[0][0] == "all"
    assert going_on.waiting[0][1] > 1.0
    ended = watched.decide(out_of_time=True)
    assert (ended.stop, ended.why) == (True, "time")
    assert watched.decide(out_of_time=False, last=12).why == "rounds"


def test_a_contrast_that_never_came_is_waited_for() -> None:
    watched = StoppingRule(
        {"all": (("all",), ("off",)), "only:x": (("only:x",), ("off",))}, {"all": 1.0, "only:x": 0.5}, 8
    )
    feed(watched, MIN_ROUNDS)
    assert watched.decide(out_of_time=False).waiting == (("only:x", float("inf")),)


def test_contrasts_of_a_plan() -> None:
    made = measurement(rounds_=1)
    assert judged(made.arms, made.collectors) == {
        "all": (("all",), ("off",)),
        "only:profile": (("only:profile",), ("off",)),
        "without:profile": (("all",), ("without:profile",)),
        "only:pipeline": (("only:pipeline",), ("off",)),
        "without:pipeline": (("all",), ("without:pipeline",)),
    }


def test_the_rule_looks_at_the_spread_and_not_at_the_effect() -> None:
    """Shift a run's contrasts by any cost: it stops at the same round."""
    for run in simulate(SHARED, Cost(), 20, np.random.default_rng(0)):
        shifted = type(run)(run.process, run.plain + 0.05, run.step + 0.05, run.tail)
        assert run_rule(run, 1.0)[0] == run_rule(shifted, 1.0)[0]


def test_simulation_agrees_with_segments() -> None:
    """The arrays of the simulation and the segments of a run give the same contrasts."""
    from bench.selfcheck.simulate import contrast, step_logs
    from bench.statistics.contrasts import contrasts

    logs = step_logs(SHARED, 1, 8, 8, np.random.default_rng(1)).reshape(1, 4, 2, 8)
    base = np.log(np.linspace(0.05, 0.2, 8))
    simulated = contrast(logs[:, :, 0], logs[:, :, 1], base)[0]
    segments = [
        segment(name, number, [float(t) for t in np.exp(logs[0, number, place] + base)])
        for number in range(4)
        for place, name in enumerate(("all", "off"))
    ]
    found = contrasts(segments, ["all"], ["off"], 8)
    np.testing.assert_allclose(simulated.plain, found.plain)
    np.testing.assert_allclose(simulated.step, found.step)
    np.testing.assert_allclose(simulated.tail, found.tail, atol=1e-12)
    assert half_width(simulated) == pytest.approx(half_width(found))


def at_most(hits: int, runs: int, rate: float) -> bool:
    """`hits` is no more than `rate` allows, at four standard errors."""
    return bool(hits / runs <= rate + 4 * (rate * (1 - rate) / runs) ** 0.5)


def dense(percent: float, name: str) -> Rates:
    noise = next(n for n in NOISES if n.name == name)
    return rates(noise, Cost(dense=log_ratio(percent)), RUNS, budget_percent=1.0, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["independent", "shared machine", "drift 10%"])
def test_identical_code(name: str) -> None:
    """Coverage and false alarms on independent, autocorrelated and drifting noise."""
    found = dense(0.0, name)
    assert at_most(RUNS - found.low_held, RUNS, 0.05)
    assert at_most(RUNS - found.high_held, RUNS, 0.05)
    assert found.verdicts[Verdict.OVER] == 0
    assert found.verdicts[Verdict.WITHIN] >= 0.95 * RUNS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shared machine", "drift 10%"])
def test_a_cost_as_large_as_the_budget(name: str) -> None:
    """Never green by more than the error; nearly always shown to be slower."""
    found = dense(1.0, name)
    assert at_most(found.verdicts[Verdict.WITHIN], RUNS, 0.05)
    assert at_most(found.verdicts[Verdict.OVER], RUNS, 0.05)
    assert found.slower >= 0.97 * RUNS
    assert found.rounds < CAP


@pytest.mark.slow
def test_twice_the_budget_is_over() -> None:
    found = dense(2.0, "shared machine")
    assert found.verdicts[Verdict.OVER] >= 0.97 * RUNS
    assert found.verdicts[Verdict.WITHIN] == 0


@pytest.mark.slow
def test_a_cost_on_one_step_in_twenty_does_not_pass() -> None:
    """The middle steps do not see it; the tails and the whole segments do."""
    found = rates(SHARED, Cost(rate=0.05, size=0.4), RUNS, budget_percent=1.0, seed=1)
    assert found.percent == pytest.approx(1.96, abs=0.01)
    assert at_most(found.verdicts[Verdict.WITHIN], RUNS, 0.05)
    assert found.plain > 0.8 * RUNS


def test_bounds_taken_at_nominal_keep_five_percent_through_the_rule() -> None:
    """At the spread where stopping does most harm, 20 rounds on average."""
    runs = 8000
    assert at_most(round(runs * stopping_error(NOMINAL, 0.8, runs)), runs, 0.05)
    assert stopping_error(0.05, 0.8, runs) > 0.055


def test_rates_are_repeatable_and_told_with_their_error() -> None:
    one, two = (rates(NOISES[-1], Cost(), 20, 1.0, seed=3) for _ in range(2))
    assert one == two
    assert share(0, 59) == "0.0% (0.0-6.1)"
    assert "| quiet" in report([one], 1.0)
    assert NOMINAL < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("between", [0.0, 0.001, 0.002, 0.004])
@pytest.mark.parametrize("launches", [3, 5])
def test_error_over_launches_whatever_their_spread(launches: int, between: float) -> None:
    """Ten rounds of 0.5% in each launch; the mean of a launch spreads by 0.16% of its own, and by `between`
    beside it."""
    rng = np.random.default_rng([launches, int(1e4 * between)])
    process = np.arange(10 * launches) // 10
    none = np.empty(0)
    missed = 0
    for _ in range(RUNS):
        values = np.repeat(rng.normal(0, between, launches), 10) + rng.normal(0, 0.005, 10 * launches)
        found = estimate_units(values, process)
        assert found is not None
        missed += found.theta > found.bound(NOMINAL)
    assert at_most(missed, RUNS, 0.05)
    assert half_width(Rounds(process, values, none, none)) > 0


def test_pooling_launches_that_differ_would_err() -> None:
    """What estimate_units is for."""
    rng = np.random.default_rng(2)
    missed = 0
    for _ in range(RUNS):
        found = estimate(np.repeat(rng.normal(0, 0.005, 5), 10) + rng.normal(0, 0.005, 50))
        assert found is not None
        missed += found.theta > found.bound(NOMINAL)
    assert missed > 0.15 * RUNS
