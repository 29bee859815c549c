"""The control: a known cost is found at its size, one that does nothing is noticed, nothing else sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binomtest

from steptime.records.costs import KnownCost
from steptime.records.pairs import ALL, CONTROL, PLACEBO, Layer, Pair
from steptime.records.types import ExitCode, Verdict, slowdown_percent
from steptime.statistics import control
from steptime.statistics.control import CONTROL_ALPHA, fault, known_cost, lost_percent, told
from steptime.statistics.effects import least_squares
from steptime.statistics.enough import spreads
from steptime.statistics.judging import Budgets, judge
from steptime.statistics.observed import observe
from steptime.statistics.throughput import all_segments, off_segments, on_segments, throughput
from tests.steptime.make import counts, judged, measured
from tests.steptime.statistics.pairs import NOISES, SECONDS_PER, pairs_of
from tests.steptime.statistics.test_judging import evidence

SWITCHES = ("batch", "losses", "grads")
THETA = 0.02


def quiet(halves: int, spread: float = 0.02) -> NDArray[np.float64]:
    return np.asarray(spread * np.random.default_rng(4).normal(size=halves))


def pairs(takes: float = THETA, says: float = THETA, halves: int = 800) -> list[Pair]:
    return pairs_of(SWITCHES, quiet(halves), {"grads": 0.03}, 1, layers=tuple(Layer), control=(takes, says))


def found(pairs: Sequence[Pair], switches: Sequence[str] = SWITCHES) -> KnownCost:
    one = known_cost(pairs, switches)
    assert one is not None
    return one


def test_a_known_cost_is_found_at_its_size() -> None:
    one = found(pairs())
    assert one.percent == pytest.approx(slowdown_percent(THETA))
    assert one.estimate.low < one.percent < one.estimate.high
    assert one.estimate.low > 0
    assert fault(one) == ""
    assert told(one).startswith("a known 2.0% was measured as ")
    assert told(one).endswith("]")


def test_the_size_is_what_it_lost_and_not_what_was_asked_of_it() -> None:
    one = found(pairs(0.05, 0.05))
    assert one.percent == pytest.approx(slowdown_percent(0.05))
    assert fault(one) == ""


@pytest.mark.fault
@pytest.mark.parametrize(
    ("takes", "says", "why"),
    [
        (0.0, THETA, "a known 2.0% was measured as -?0.[0-9]% "),
        (0.05, THETA, "a known 2.0% was measured as [45].[0-9]% "),
        (0.0, 0.0, "the control lost 0.00% where 2% was asked of it"),
    ],
)
def test_a_control_that_does_not_do_what_it_says_makes_the_run_invalid(
    takes: float, says: float, why: str
) -> None:
    import re

    one = found(pairs(takes, says))
    assert re.search(why, fault(one))
    assert "NOT as it is" in told(one)
    made = measured(control=(takes, says), noise=0.01, pairs=400)
    _, judgement = judged(made)
    assert (judgement.verdict, judgement.exit_code) == (Verdict.INVALID, ExitCode.INVALID)
    assert any("control" in reason for reason in judgement.reasons)
    assert judgement.all is not None
    assert judgement.all.verdict is Verdict.INVALID
    assert judged(measured(control=(THETA, THETA), noise=0.01, pairs=400))[1].verdict is not Verdict.INVALID


def test_a_count_that_rose_is_told_before_the_control() -> None:
    counted = counts(profile=2)
    _, judgement = judged(measured(control=(0.0, THETA), noise=0.01, pairs=400), counted)
    assert judgement.verdict is Verdict.OVER


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(NOISES))
def test_a_control_that_works_is_refused_no_more_often_than_stated(kind: str) -> None:
    runs, refused, missed = 150, 0, 0
    for seed in range(runs):
        noise = NOISES[kind](np.random.default_rng([seed, 7]), 120)
        taken = pairs_of(SWITCHES, noise, {"grads": 0.05}, seed, control=(THETA, THETA))
        one = known_cost(taken, SWITCHES, seed, redraws=1999)
        assert one is not None
        refused += bool(fault(one))
        missed += not one.estimate.low <= one.percent <= one.estimate.high
    assert binomtest(refused, runs, CONTROL_ALPHA, "greater").pvalue > 0.001
    assert binomtest(missed, runs, 0.1, "greater").pvalue > 0.001


def test_a_bound_that_misses_by_chance_is_told_and_fails_nothing() -> None:
    one = found(pairs())
    beside = replace(one, estimate=replace(one.estimate, low=2.2, high=2.9), p_value=0.04)
    assert told(beside).endswith("missed, as one run in ten does by chance")
    assert judge(evidence(control=beside)).verdict is Verdict.WITHIN
    wide = replace(one, estimate=replace(one.estimate, low=-0.3, high=2.9))
    assert told(wide).endswith("not told from nothing in so few pairs")


def test_nothing_else_sees_it() -> None:
    plain = pairs_of(SWITCHES, quiet(800), {"grads": 0.03}, 1, layers=tuple(Layer))
    dear = pairs(0.3, 0.3)
    without, beside = (observe(one, SWITCHES, SECONDS_PER, Budgets()) for one in (plain, dear))
    assert without.control is None
    assert beside.control is not None
    assert beside.all == without.all
    assert CONTROL not in beside.collectors
    for name in (*SWITCHES, PLACEBO):
        one, other = ({**found.collectors, PLACEBO: found.placebo}[name] for found in (without, beside))
        assert one is not None
        assert other is not None
        assert other.percent == pytest.approx(one.percent, abs=2 * one.standard_error)
        assert other.standard_error < 1.2 * one.standard_error
    assert throughput(dear) == throughput([one for one in plain if not _is_off_with_it(one, dear)])
    assert all(CONTROL not in half.on for half in off_segments(dear) + all_segments(dear))
    assert on_segments(dear, "batch")
    assert all(CONTROL not in half.on for half in on_segments(dear, "batch"))
    squares = least_squares(dear, SWITCHES, SECONDS_PER)
    assert set(squares) == {*SWITCHES, PLACEBO, ALL}
    assert squares[ALL][1] < 1.2 * least_squares(plain, SWITCHES, SECONDS_PER)[ALL][1]
    assert spreads(dear, SECONDS_PER)[Layer.PATH] < 0.06


def _is_off_with_it(pair: Pair, dear: Sequence[Pair]) -> bool:
    """A pair whose half with nothing on has the control in the other run."""
    twin = dear[pair.number]
    return any(set(half.on) - {PLACEBO} == {CONTROL} for half in (twin.first, twin.second))


def test_there_is_none_where_there_is_none() -> None:
    plain = pairs_of(SWITCHES, quiet(100), {}, 1)
    assert known_cost(plain, SWITCHES) is None
    assert lost_percent(plain) == 0.0
    assert fault(None) == ""
    own = pairs_of((CONTROL, "batch"), quiet(100), {CONTROL: 0.05}, 1)
    assert known_cost(own, (CONTROL, "batch")) is None, "a user's own switch of that name"
    shown = observe(own, (CONTROL, "batch"), {Layer.PATH: 0.0}, Budgets())
    assert shown.collectors[CONTROL].percent == pytest.approx(4.9, abs=1)
    assert control.CONTROL_PERCENT == 2.0
