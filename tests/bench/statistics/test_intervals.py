"""The statistics against slow obvious ones, scipy and hand-made numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bench.records.types import log_ratio, slowdown_percent
from bench.statistics.contrasts import contrasts, midmean, tail_excess
from bench.statistics.estimates import Estimate, estimate
from bench.statistics.intervals import (
    NOMINAL,
    holm,
    interval,
    minimum_detectable,
    p_over,
    sign_flip,
    throughput,
)
from tests.bench.make import made_rounds as made
from tests.bench.make import segment

ONE = np.zeros(1, dtype=np.int64)


@given(st.floats(-50, 60))
def test_percent_and_log_ratio_are_inverse(percent: float) -> None:
    assert slowdown_percent(log_ratio(percent)) == pytest.approx(percent, abs=1e-9)


@pytest.mark.parametrize(
    ("percent", "theta"), [(1.0, 0.01005034), (2.0, 0.02020271), (5.0, 0.05129329), (0.0, 0.0)]
)
def test_percent_is_lost_throughput(percent: float, theta: float) -> None:
    assert log_ratio(percent) == pytest.approx(theta, abs=1e-8)
    assert np.exp(-log_ratio(percent)) == pytest.approx(1 - percent / 100)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(1, 5)), min_size=1, max_size=12))
def test_midmean_is_the_middle_half_of_repeated_values(pairs: list[tuple[int, int]]) -> None:
    values = np.array([v for v, _ in pairs], dtype=float)
    weights = np.array([w for _, w in pairs], dtype=float)
    repeated = np.sort(np.repeat(values, [4 * w for _, w in pairs]))
    quarter = len(repeated) // 4
    assert float(midmean(values, weights)) == pytest.approx(repeated[quarter:-quarter].mean(), abs=1e-9)


def test_midmean_works_along_the_last_axis() -> None:
    values = np.random.default_rng(0).normal(size=(3, 5, 8))
    weights = np.arange(1.0, 9.0)
    one_by_one = [[float(midmean(row, weights)) for row in block] for block in values]
    np.testing.assert_allclose(midmean(values, weights), one_by_one)


def test_plain_contrast_by_hand() -> None:
    segments = [segment("off", 0, 1.0), segment("x", 0, 1.1), segment("off", 1, 2.0), segment("x", 1, 2.4)]
    np.testing.assert_allclose(contrasts(segments, ["x"], ["off"], 8).plain, [np.log(1.1), np.log(1.2)])


def test_several_segments_of_an_arm_are_averaged_in_logs() -> None:
    segments = [segment("off", 0, 1.0), segment("off", 0, 4.0), segment("x", 0, 2.0)]
    np.testing.assert_allclose(contrasts(segments, ["x"], ["off"], 8).plain, [0.0], atol=1e-12)


def test_each_arm_of_a_group_counts_once() -> None:
    segments = [segment("off", 0, 1.0), segment("x", 0, 1.0), segment("x", 0, 1.0), segment("y", 0, np.e)]
    np.testing.assert_allclose(contrasts(segments, ["x", "y"], ["off"], 8).plain, [0.5])


def test_a_round_without_one_of_the_arms_is_left_out() -> None:
    segments = [segment("off", 0, 1.0), segment("x", 0, 1.1), segment("off", 1, 1.0)]
    assert len(contrasts(segments, ["x"], ["off"], 8)) == 1
    assert interval(contrasts(segments, ["x"], ["off"], 8)) is None


def test_steps_pair_by_batch_wherever_the_segment_begins() -> None:
    base = np.array([1.0, 2.0, 3.0, 4.0])
    off = segment("off", 0, list(base), phase=0)
    turned = segment("x", 0, list(1.1 * np.roll(base, -3)), phase=3)
    found = contrasts([off, turned], ["x"], ["off"], 4)
    np.testing.assert_allclose(found.step, [np.log(1.1)])
    np.testing.assert_allclose(found.tail, [0.0])


def test_unlike_batches_do_not_pair() -> None:
    off, other = segment("off", 0, [1.0, 1.0], phase=0), segment("x", 0, [1.0, 1.0], phase=2)
    assert len(contrasts([off, other], ["x"], ["off"], 4).step) == 0


def test_a_constant_cost_in_seconds_is_its_share_of_the_whole() -> None:
    """Without weights short batches would count too much: c/t is larger for them."""
    base = np.array([0.02, 0.05, 0.08, 0.08, 0.09, 0.10, 0.12, 0.30])
    cost = 0.01 * base.mean()
    rounds = contrasts([segment("off", 0, list(base)), segment("x", 0, list(base + cost))], ["x"], ["off"], 8)
    unweighted = np.log((base + cost) / base).mean()
    assert abs(rounds.step[0] - rounds.plain[0]) < 0.15 * rounds.plain[0]
    assert abs(unweighted - rounds.plain[0]) > 0.5 * rounds.plain[0]


def test_one_stall_moves_plain_and_not_step() -> None:
    base = [0.1] * 16
    stalled = [*base[:-1], 0.2]
    found = contrasts([segment("off", 0, base), segment("x", 0, stalled)], ["x"], ["off"], 16)
    assert found.plain[0] == pytest.approx(np.log(1.7 / 1.6))
    assert found.step[0] == 0.0


def test_bounds_are_those_of_the_t_distribution() -> None:
    values = np.random.default_rng(1).normal(0.01, 0.02, 11)
    found = interval(made(values))
    assert found is not None
    low, high = stats.ttest_1samp(values, 0).confidence_interval(1 - 2 * NOMINAL)
    assert (found.low, found.high) == pytest.approx((slowdown_percent(low), slowdown_percent(high)))
    assert found.p_two_sided == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    assert p_over(found, 0.5) == pytest.approx(
        stats.ttest_1samp(values, log_ratio(0.5), alternative="greater").pvalue
    )
    assert (found.n, found.estimator) == (11, "plain")


@pytest.mark.parametrize("n", [2, 5, 8, 12])
def test_sign_flip_is_exact_for_few_units(n: int) -> None:
    values = np.random.default_rng(n).normal(0.3, 1.0, n)
    reference = stats.permutation_test(
        (values,), np.mean, permutation_type="samples", alternative="greater", n_resamples=np.inf
    )
    assert sign_flip(values) == pytest.approx(reference.pvalue)
    assert sign_flip(np.abs(values) + 1) == pytest.approx(2.0**-n)


def test_sign_flip_of_many_units_is_near_the_t_test() -> None:
    values = np.random.default_rng(3).normal(0.2, 1.0, 60)
    assert sign_flip(values) == pytest.approx(
        stats.ttest_1samp(values, 0, alternative="greater").pvalue, abs=0.02
    )
    assert sign_flip(values) == sign_flip(values)


def test_equivalence_is_the_worse_of_two_one_sided_tests() -> None:
    values = np.random.default_rng(4).normal(0.002, 0.004, 20)
    found = estimate(values)
    assert found is not None
    upper = stats.ttest_1samp(values, 0.01, alternative="less").pvalue
    assert found.p_below(0.01) == pytest.approx(upper)


def test_holm_by_hand() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}) == pytest.approx(
        {"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06}
    )
    assert holm({"a": 0.9, "b": 0.8}) == {"b": 1.0, "a": 1.0}
    assert holm({}) == {}


def test_processes_are_the_units_when_there_are_several() -> None:
    rng = np.random.default_rng(5)
    values = np.repeat(rng.normal(0, 0.01, 4), 10) + rng.normal(0, 0.001, 40)
    together, apart = interval(made(values)), interval(made(values, processes=4))
    assert together is not None
    assert apart is not None
    assert (together.n, apart.n) == (40, 4)
    # Forty rounds in four launches are four pieces of evidence, not forty.
    assert apart.high - apart.low > 3 * (together.high - together.low)
    assert apart.percent == pytest.approx(slowdown_percent(values.reshape(4, 10).mean()))


def test_rounds_are_the_units_when_launches_spread_no_more_than_they_do() -> None:
    rng = np.random.default_rng(11)
    noise = rng.normal(0, 0.01, (3, 10))
    level = noise - noise.mean(1, keepdims=True)
    found = interval(made(level.ravel() + 0.003, processes=3))
    assert found is not None
    assert found.n == 30 - 3 + 1
    assert found.percent == pytest.approx(slowdown_percent(0.003))
    two = interval(made(level[:2].ravel(), processes=2))
    assert two is not None
    assert two.n == 2
    assert p_over(found, 0.0) == pytest.approx((found.p_two_sided or 0) / 2)


def test_minimum_detectable_is_found_as_often_as_it_says() -> None:
    found = Estimate(0.0, 0.02 / 12**0.5, 11, np.zeros(12))
    theta = minimum_detectable(found)
    noncentral = theta / found.standard_error
    power = stats.nct.sf(stats.t.isf(NOMINAL, 11), 11, noncentral)
    assert 0.94 < power < 0.98


def test_fewer_than_two_units_say_nothing() -> None:
    assert estimate(np.array([0.1])) is None
    assert interval(made(np.empty(0))) is None
    assert throughput([segment("off", 0, 1.0)], "off") is None


def test_tails_of_exchangeable_noise_cancel() -> None:
    rng = np.random.default_rng(7)
    noise = rng.exponential(1.0, (2000, 2, 16)) ** 2
    difference = noise[:, 0] - noise[:, 1]
    excess = tail_excess(difference, np.ones(16), midmean(difference, np.ones(16)))
    assert abs(excess.mean()) < 4 * excess.std() / 2000**0.5
    one_sided = difference + 40.0 * (rng.random((2000, 16)) < 0.1)
    assert tail_excess(one_sided, np.ones(16), midmean(one_sided, np.ones(16))).mean() > 0.05


def test_ceiling_lowers_the_upper_bound_and_leaves_the_lower() -> None:
    rng = np.random.default_rng(8)
    wide, tight = made(rng.normal(0, 0.02, 12)), made(rng.normal(0.001, 0.001, 12))
    alone, bounded = interval(wide), interval(wide, tight)
    assert alone is not None
    assert bounded is not None
    assert bounded.low == alone.low
    assert bounded.high < 0.3 < alone.high
    assert bounded.ceiling_percent is not None
    assert alone.ceiling_percent is None


@pytest.mark.slow
def test_ceiling_keeps_its_error_at_the_worst_point() -> None:
    """True cost equal in both contrasts, noise independent: where the lower of two bounds errs most."""
    rng = np.random.default_rng(9)
    runs, misses = 2000, 0
    for _ in range(runs):
        found = interval(made(rng.normal(0.005, 0.01, 12)), made(rng.normal(0.005, 0.01, 12)))
        assert found is not None
        misses += found.high < slowdown_percent(0.005)
    assert misses / runs < NOMINAL + 3 * (NOMINAL / runs) ** 0.5


def test_throughput_is_the_geometric_mean() -> None:
    found = throughput([segment("off", 0, 1.0), segment("off", 1, 4.0), segment("x", 1, 9.0)], "off")
    assert found is not None
    assert found[0] == pytest.approx(50.0)
    assert found[1] < 50.0 < found[2]
