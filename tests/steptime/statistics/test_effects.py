"""The estimator: uniform p-values for a free switch in any noise, known costs at their size, bounds that
hold; and every set of signs tried by hand for few pairs."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from scipy import stats

from steptime.records.pairs import ALL, PLACEBO, Layer, Pair, Question, Segment
from steptime.records.types import log_ratio, slowdown_percent
from steptime.statistics import effects
from steptime.statistics.design import Draw
from steptime.statistics.effects import Sample, estimates, least_squares, redraw, total
from tests.steptime.statistics.pairs import NOISES, SECONDS_PER, autoregressive, pair_of, pairs_of

SWITCHES = ("batch", "losses", "grads")
PATH_ONLY = {Layer.PATH: 0.0}
BUDGETS = dict.fromkeys((*SWITCHES, PLACEBO), 0.5) | {ALL: 1.0}
EVERY_SIGN = np.array(list(product((-1.0, 1.0), repeat=6)))

series = arrays(np.float64, 6, elements=st.floats(-1.0, 1.0, width=32))


def of(y: NDArray[np.float64], signs: NDArray[np.float64]) -> Sample:
    return Sample(Layer.PATH, tuple("abcdefgh"[: signs.shape[1]]), y, signs)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(series, st.integers(0, 2**12 - 1), st.floats(-0.3, 0.3))
def test_a_free_switch_has_uniform_p_values_whatever_the_noise_and_the_others(
    noise: NDArray[np.float64], others: int, interaction: float
) -> None:
    """Exactly: over all signs that its coins may give, each p is as likely as any other."""
    x = 1.0 - 2.0 * ((others >> np.arange(12)) & 1).reshape(6, 2)
    y = noise + 0.05 * x[:, 0] - 0.3 * x[:, 1] + interaction * x[:, 0] * x[:, 1]
    y = y + 1e-6 * np.sin(np.arange(6) + 1.0)  # no ties
    found = []
    for signs in EVERY_SIGN:
        sample = of(y, np.column_stack([signs, x]))
        found.append(total([redraw(sample, 0, exact=True)], "a", 1.0).p_slower)
    ranks = np.sort(found) * len(EVERY_SIGN)
    # Ties make a p larger, never smaller: at most as many lie at or below k/64 as there should.
    assert (ranks >= np.arange(1, 65) - 1e-6).all()
    tied = len(set(np.round(found, 9))) < len(found)
    assert tied or ranks == pytest.approx(np.arange(1, 65))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(series, st.integers(0, 63), st.integers(0, 63), st.sampled_from([0.0, 0.005, -0.02, 0.3]))
def test_p_and_bounds_are_those_of_trying_every_set_of_signs_by_hand(
    noise: NDArray[np.float64], own: int, other: int, cost: float
) -> None:
    s, x = EVERY_SIGN[own], EVERY_SIGN[other]
    y = noise + cost * s + 1e-6 * np.sin(np.arange(6) + 1.0)
    table = np.column_stack([np.ones(6), x])
    slopes = np.linalg.inv(table.T @ table + effects.MIN_RIDGE * np.eye(2)) @ table.T @ y
    explained = slopes @ slopes
    ridge = max(2 * np.sum((y - table @ slopes) ** 2) / 4 / explained, effects.MIN_RIDGE)
    m = np.eye(6) - table @ np.linalg.inv(table.T @ table + ridge * np.eye(2)) @ table.T

    def p_slower(at: float) -> float:
        left = y - at * s
        reached = s @ m @ left / math.sqrt(s @ m @ s)
        every = [t @ m @ left / math.sqrt(t @ m @ t) for t in EVERY_SIGN]
        return float(np.mean([one >= reached - 1e-12 for one in every]))

    found = total([redraw(of(y, np.column_stack([s, x])), 0, exact=True)], "a", 1.0)
    assert found.p_slower == pytest.approx(p_slower(0.0))
    assert found.p_over == pytest.approx(p_slower(log_ratio(1.0)))
    low = log_ratio(found.low)
    assert p_slower(low - 1e-9) <= effects.ALPHA < p_slower(low + 1e-9)


def test_both_bounds_mirror_each_other() -> None:
    rng = np.random.default_rng(0)
    y, signs = 0.1 * rng.normal(size=9), rng.choice((-1.0, 1.0), (9, 3))
    up = total([redraw(of(y, signs), 0, exact=True)], "b", 1.0)
    down = total([redraw(of(-y, signs), 0, exact=True)], "b", 1.0)
    assert log_ratio(up.low) == pytest.approx(-log_ratio(down.high))
    assert log_ratio(up.percent) == pytest.approx(-log_ratio(down.percent))
    assert (up.p_slower, up.p_over) == pytest.approx((down.p_faster, down.p_under))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "layers"),
    [*((noise, (Layer.PATH,)) for noise in NOISES), ("autocorrelated", tuple(Layer))],
)
def test_p_values_of_free_switches_are_uniform_through_design_and_layers(
    noise: str, layers: tuple[Layer, ...]
) -> None:
    """Another switch costs 5%, two others 10% more together; the free one's, the placebo's and (in pairs of
    nothing but free ones) all together's p must not show it."""
    rng = np.random.default_rng([7, len(layers), len(noise)])
    each, together = [], []
    for seed in range(100):
        costs = {"batch": 0.05, "losses": 0.0}
        values = NOISES[noise](rng, 70 * len(layers))
        pairs = pairs_of(SWITCHES, values, costs, seed, layers=layers, interaction=0.1)
        per = {layer: SECONDS_PER[layer] for layer in layers}
        found = estimates(pairs, Question.EACH, SWITCHES, per, BUDGETS, seed, 399)
        each.append([found["grads"].p_slower, found[PLACEBO].p_faster])
        free = pairs_of(SWITCHES, values, {}, seed, layers=layers)
        together.append(estimates(free, Question.TOGETHER, SWITCHES, per, BUDGETS, seed, 399)[ALL].p_slower)
    for values in (*np.array(each).T, np.array(together)):
        assert stats.kstest(values, "uniform").pvalue > 1e-3
        assert np.mean(values <= 0.05) < 0.05 + 2.6 * (0.05 * 0.95 / len(values)) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("layers", [(Layer.PATH,), tuple(Layer)])
def test_bounds_hold_as_often_as_they_say(layers: tuple[Layer, ...]) -> None:
    rng = np.random.default_rng(3)
    each = 0.02
    truth = slowdown_percent(each * len(layers))  # the same share in every layer
    below, above = [], []
    for seed in range(120):
        noise = autoregressive(rng, 120 * len(layers), 0.63, 0.1)
        pairs = pairs_of(SWITCHES, noise, {"batch": 0.03, "losses": each}, seed, layers=layers)
        per = {layer: SECONDS_PER[layer] for layer in layers}
        found = estimates(pairs, Question.EACH, SWITCHES, per, BUDGETS, seed, 399)["losses"]
        below.append(found.low <= truth)
        above.append(found.high >= truth)
    for held in (np.mean(below), np.mean(above)):
        assert 0.90 <= held <= 0.995  # 0.95, and 2.6 standard errors of 120 runs


def test_known_costs_are_found_at_their_size_in_their_layer() -> None:
    rng = np.random.default_rng(5)
    pairs = [
        pair_of(draw, i, 0.02 * rng.normal(size=2), {"batch": 0.03 if draw.layer is Layer.TICK else 0.0})
        for i, draw in enumerate(_even_draws(rng, 600))
    ]
    found = estimates(pairs, Question.EACH, SWITCHES, SECONDS_PER, BUDGETS)
    assert found["batch"].low < slowdown_percent(0.03) < found["batch"].high
    assert found["batch"].layers.tick_ms == pytest.approx(30.0, abs=1.5)
    assert found["batch"].layers.path_percent == pytest.approx(0.0, abs=0.5)
    assert found["batch"].layers.flush_ms == pytest.approx(0.0, abs=1.5)
    for free in ("losses", "grads", PLACEBO):
        assert found[free].low < 0.0 < found[free].high
    squares = least_squares(pairs, SWITCHES, SECONDS_PER)
    for name in SWITCHES:
        percent, error = squares[name]
        assert percent == pytest.approx(found[name].percent, abs=3 * error)
        assert error == pytest.approx(found[name].standard_error, rel=0.2)
    assert squares[ALL][0] == pytest.approx(slowdown_percent(0.03), abs=3 * squares[ALL][1])


def _even_draws(rng: np.random.Generator, count: int) -> list[Draw]:
    names = frozenset((*SWITCHES, PLACEBO))
    layers = list(Layer)
    drawn = []
    for i in range(count):
        first = frozenset(name for name in sorted(names) if rng.random() < 0.5)
        drawn.append(Draw(layers[i % 3], Question.EACH, first, names - first))
    return drawn


def test_a_dear_switch_does_not_hide_the_others() -> None:
    """30% in one switch, 2% in another, 0.5% of noise: the test of the second must see past the first."""
    pairs = pairs_of(
        SWITCHES, 0.005 * np.random.default_rng(0).normal(size=160), {"batch": 0.3, "losses": 0.02}, 0
    )
    found = estimates(pairs, Question.EACH, SWITCHES, PATH_ONLY, BUDGETS)
    assert found["losses"].percent == pytest.approx(slowdown_percent(0.02), abs=0.5)
    assert found["losses"].low > 1.0
    assert found["grads"].high < 1.0


def test_mde_is_the_cost_found_in_95_of_100_runs() -> None:
    rng = np.random.default_rng(11)
    signs = np.ones((60, 1))
    pilot = total([redraw(of(0.05 * rng.normal(size=60), signs), 0)], "a", 1.0)
    assert pilot.mde == pytest.approx(100 * 3.29 * 0.05 / 60**0.5, rel=0.2)
    cost = 3.29 * 0.05 / 60**0.5
    found = [
        total([redraw(of(cost + 0.05 * rng.normal(size=60), signs), seed)], "a", 1.0).low > 0
        for seed in range(150)
    ]
    assert 0.89 <= np.mean(found) <= 0.99


def test_the_unit_of_a_gate_is_the_launch() -> None:
    """Launches lie 3% apart and their pairs 0.3%: pairs taken for units would claim a tenth of the error."""
    rng = np.random.default_rng(2)
    names = frozenset({"head"})
    pairs: list[Pair] = []
    for launch in range(8):
        shift = 0.03 * rng.normal()
        for i in range(20):
            first = names if rng.random() < 0.5 else frozenset()
            draw = Draw(Layer.PATH, Question.EACH, first, names - first)
            pairs.append(pair_of(draw, i, 0.003 * rng.normal(size=2), {"head": shift}, process=launch))
    found = effects.estimate_launches(pairs, "head", {Layer.PATH: 1.0}, 1.0)
    assert found is not None
    assert found.n == 8
    assert 0.5 < found.standard_error < 2.0
    means = effects.launches(pairs, "head", {Layer.PATH: 1.0}).y
    flips = np.array(list(product((-1, 1), repeat=8))) @ means
    assert found.p_slower == pytest.approx(np.mean(flips >= means.sum() - 1e-12))
    assert effects.estimate_launches(pairs[:120], "head", {Layer.PATH: 1.0}, 1.0) is None


def test_the_steps_of_a_gates_tick_are_not_its_ticks_cost() -> None:
    """Head loses 10% of each step and 20 ms in each tick, of which there is one a second."""
    pairs = []
    for process in range(7):
        for number in range(8):
            for layer, steps, more in ((Layer.PATH, 1, 0.0), (Layer.TICK, 5, 0.02)):
                base = Segment((), steps, 100 * steps, 0.09 * steps + (0.003 if layer is Layer.TICK else 0.0))
                seconds = 0.1 * steps + more + (0.003 if layer is Layer.TICK else 0.0)
                head = Segment(("head",), steps, 100 * steps, seconds)
                halves = (base, head) if number % 2 else (head, base)
                pairs.append(Pair(number, layer, Question.EACH, *halves, process=process))
    seconds_per = {Layer.PATH: 1.0, Layer.TICK: 1.0}
    found = effects.launches(pairs, "head", seconds_per).y
    assert found == pytest.approx([np.log(0.1 / 0.09) + 0.02] * 7)
    assert len(effects.launches(pairs[::2], "head", seconds_per).y) == 0, "a layer is missing"


def test_few_pairs_of_one_layer_say_nothing_at_all() -> None:
    noise = 0.1 * np.random.default_rng(0).normal(size=400)
    pairs = pairs_of(SWITCHES, noise, {}, 0, layers=tuple(Layer))
    assert estimates(pairs, Question.EACH, SWITCHES, SECONDS_PER, BUDGETS)
    kept = [p for p in pairs if p.layer is not Layer.FLUSH] + [p for p in pairs if p.layer is Layer.FLUSH][
        :10
    ]
    assert not estimates(kept, Question.EACH, SWITCHES, SECONDS_PER, BUDGETS)
    assert not least_squares(kept, SWITCHES, SECONDS_PER)


def test_the_same_seed_gives_the_same_answer() -> None:
    noise = 0.1 * np.random.default_rng(0).normal(size=200)
    pairs = pairs_of(SWITCHES, noise, {"batch": 0.02}, 0)
    one, two = (estimates(pairs, Question.EACH, SWITCHES, PATH_ONLY, BUDGETS, 5) for _ in range(2))
    assert one == two


@pytest.mark.fault
@pytest.mark.parametrize(
    "flipped", [pytest.param(False, id="one half's costs"), pytest.param(True, id="signs of the wrong half")]
)
def test_a_cost_on_the_wrong_half_comes_out_negative(flipped: bool) -> None:
    """A design and an estimator that disagree on which half is which would find costs as gains."""
    noise = 0.01 * np.random.default_rng(0).normal(size=400)
    pairs = pairs_of(SWITCHES, noise, {"batch": 0.05}, 0)
    if flipped:
        pairs = [
            Pair(p.number, p.layer, p.question, p.second, p.first, p.process)  # the order does not matter
            for p in pairs
        ]
    found = estimates(pairs, Question.EACH, SWITCHES, PATH_ONLY, BUDGETS)
    assert found["batch"].percent == pytest.approx(slowdown_percent(0.05), abs=0.3)


@pytest.mark.fault
def test_bounds_stay_finite_where_few_pairs_leave_a_switch_wholly_open() -> None:
    drawn = redraw(of(0.1 * np.random.default_rng(0).normal(size=9), EVERY_SIGN[:9, :2]), 0, exact=True)
    wide = replace(drawn, low=np.full_like(drawn.low, -1e4), high=np.full_like(drawn.high, np.inf))
    found = total([wide], "a", 1.0)
    assert found.low == pytest.approx(slowdown_percent(-effects.WIDEST))
    assert found.high == pytest.approx(slowdown_percent(effects.WIDEST))
