"""Which estimator judges, what it trims, and that what it would hide is seen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bench.records.types import log_ratio, slowdown_percent
from bench.statistics.contrasts import Rounds
from bench.statistics.estimates import (
    CUT,
    MIDDLE_OF_PROCESS,
    MIDDLE_ROUNDS,
    MIDDLE_SHARPER,
    estimate_middle,
    falls_on_few_rounds,
    falls_on_few_steps,
    judging,
    trimmed,
)
from bench.statistics.intervals import NOMINAL, SWITCHED, interval, sign_flip
from tests.bench.make import made_rounds as made


def judge(rounds: Rounds) -> str:
    """Name of the estimator that judges."""
    found = judging(rounds)
    assert found is not None
    return found.name


def heavy(rng: np.random.Generator, n: int, scale: float = 0.03) -> np.ndarray:
    """Rounds of a shared machine: most quiet, one in eight with others on the core. Excess kurtosis about
    5."""
    return rng.normal(0, scale, n) * np.where(rng.random(n) < 0.125, 3.0, 1.0)


def test_a_cost_on_few_steps_makes_whole_segments_judge() -> None:
    rng = np.random.default_rng(6)
    step = rng.normal(0, 0.002, 30)
    sparse = made(step + 0.02 + rng.normal(0, 0.01, 30), step, rng.binomial(16, 0.06, 30) / 16)
    assert falls_on_few_steps(sparse)
    assert judge(sparse) == "plain"
    found = interval(sparse)
    assert found is not None
    low = stats.ttest_1samp(sparse.plain, 0).confidence_interval(1 - 2 * SWITCHED).low
    assert found.low == pytest.approx(slowdown_percent(low)), "it was chosen for being high"
    noisy = made(
        step + rng.normal(0, 0.02, 30), step, (rng.binomial(16, 0.06, 30) - rng.binomial(16, 0.06, 30)) / 16
    )
    assert judge(noisy) == "step"


def test_whole_segments_judge_where_steps_are_hardly_sharper() -> None:
    """And at the usual error: that choice knows nothing of the effect."""
    rng = np.random.default_rng(12)
    plain = rng.normal(0.004, 0.01, 40)
    level = made(plain, 0.9 * (plain - plain.mean()), np.zeros(40))
    assert judge(level) == "plain"
    found, alone = interval(level), interval(made(plain))
    assert found is not None
    assert alone is not None
    assert (found.low, found.high) == (alone.low, alone.high)
    assert judge(made(plain, 0.7 * (plain - plain.mean()) + 0.004, np.zeros(40))) == "step"
    # Launches that differ do not hide which of the two is sharper within them.
    apart = np.repeat([0.0, 0.3, -0.3, 0.1], 10)
    assert (
        judge(made(plain + apart, 0.7 * (plain - plain.mean()) + 0.004 + apart, np.zeros(40), processes=4))
        == "step"
    )


# -- the middle half of the rounds ---------------------------------------------------------------------------


@given(st.lists(st.floats(-1, 1), min_size=8, max_size=60))
def test_the_middle_half_by_hand(values: list[float]) -> None:
    """Sorted, a quarter off each end; the error from the values pulled in to what is kept (Yuen 1974)."""
    n, cut = len(values), int(CUT * len(values))
    kept = sorted(values)[cut : n - cut]
    pulled = [min(max(value, kept[0]), kept[-1]) for value in values]
    mean = sum(pulled) / n
    squares = sum((value - mean) ** 2 for value in pulled)
    found = trimmed(np.array(values))
    assert found.theta == pytest.approx(sum(kept) / len(kept), abs=1e-12)
    assert found.standard_error == pytest.approx((squares / (len(kept) * (len(kept) - 1))) ** 0.5, abs=1e-12)
    assert found.df == len(kept) - 1


@settings(max_examples=30)
@given(st.integers(0, 10_000))
def test_what_the_sign_flip_sees_of_it_changes_sign_with_the_values(seed: int) -> None:
    values = heavy(np.random.default_rng(seed), 50)
    np.testing.assert_array_equal(trimmed(-values).values, -trimmed(values).values)
    assert np.abs(trimmed(values).values).max() <= np.median(np.abs(values))


def test_the_middle_half_judges_in_heavy_tails_and_is_sharper() -> None:
    rng = np.random.default_rng(21)
    rounds = made(heavy(rng, 300) + log_ratio(1.0))
    found = interval(rounds)
    assert found is not None
    assert found.estimator == "middle"
    assert found.spread / found.n**0.5 < MIDDLE_SHARPER * 100 * rounds.plain.std() / 300**0.5
    assert found.low < 1.0 < found.high
    assert found.plain_percent == pytest.approx(slowdown_percent(rounds.plain.mean()))


@pytest.mark.parametrize(("n", "processes"), [(MIDDLE_ROUNDS - 1, 1), (80, 6), (1, 1)])
def test_few_rounds_are_not_trimmed(n: int, processes: int) -> None:
    values = heavy(np.random.default_rng(22), n)
    assert n // processes < MIDDLE_OF_PROCESS or n < MIDDLE_ROUNDS
    rounds = made(values, processes=processes)
    assert estimate_middle(rounds.plain, rounds.process) is None
    assert n == 1 or judge(rounds) == "plain"


def test_under_normal_noise_whole_segments_judge_at_the_usual_error() -> None:
    rounds = made(np.random.default_rng(23).normal(0.002, 0.03, 200))
    found = interval(rounds)
    assert found is not None
    assert found.estimator == "plain"
    low = stats.ttest_1samp(rounds.plain, 0).confidence_interval(1 - 2 * NOMINAL).low
    assert found.low == pytest.approx(slowdown_percent(low))


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize(("rate", "size"), [(0.06, 0.3), (0.02, 1.0), (0.15, 0.15)])
def test_a_cost_on_few_rounds_makes_whole_segments_judge(rate: float, size: float) -> None:
    """2% of the time, lost in stalls that the middle half would trim: it must not be called less."""
    rng, plain, under = np.random.default_rng(24), 0, 0
    for _ in range(100):
        stalled = rng.random(600) < rate
        rounds = made(heavy(rng, 600) + np.where(stalled, np.log1p(size), 0.0), processes=6)
        plain += judge(rounds) == "plain"
        found = interval(rounds)
        assert found is not None
        under += found.high < slowdown_percent(rate * float(np.log1p(size)))
    assert plain >= 90
    assert under <= 15


def test_the_checks_seldom_see_a_cost_in_noise() -> None:
    rng = np.random.default_rng(25)
    seen = sum(falls_on_few_rounds(heavy(rng, 200), np.zeros(200, np.int64)) for _ in range(400))
    assert seen / 400 < 0.14, "two checks of one in twenty"


@pytest.mark.slow
@pytest.mark.parametrize("spread_of_launches", [0.0, 0.004])
def test_bounds_hold_in_heavy_tails_whatever_the_launches_do(spread_of_launches: float) -> None:
    rng, runs, low, high = np.random.default_rng(26), 1000, 0, 0
    for _ in range(runs):
        launches = np.repeat(rng.normal(0, spread_of_launches, 8), 30)
        found = interval(made(heavy(rng, 240) + launches, processes=8))
        assert found is not None
        low += found.low > 0.0
        high += found.high < 0.0
    limit = 0.05 + 3 * (0.05 * 0.95 / runs) ** 0.5
    assert low / runs < limit
    assert high / runs < limit


@pytest.mark.slow
def test_the_sign_flip_agrees_with_the_bound_of_the_middle_half() -> None:
    """Else it would take back what the middle half gains."""
    rng, both = np.random.default_rng(27), 0
    for _ in range(200):
        found = interval(made(heavy(rng, 300) + 0.006))
        assert found is not None
        both += found.low > 0.0 and (found.sign_flip_p or 0.0) > 0.05
    assert both <= 6
    assert sign_flip(trimmed(heavy(rng, 100) + 0.05).values) < 0.01
