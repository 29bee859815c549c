"""The minutes that are promised are those that it takes, and looking does not depend on signs."""

from __future__ import annotations

import numpy as np
import pytest

from steptime.records.pairs import Layer, Question
from steptime.statistics import enough
from steptime.statistics.effects import loss
from tests.steptime.statistics.pairs import LENGTHS, SECONDS_PER, pairs_of

LAYERS = tuple(Layer)


def test_the_printed_minutes_are_those_after_which_a_free_run_is_within_its_budget() -> None:
    """Spread 10% a half, 0.27 s a pair, path alone: V = (0.1 sqrt 2)^2 x 0.27 / 0.5."""
    plan = enough.plan({Layer.PATH: 0.1 * 2**0.5}, {Layer.PATH: 0.27}, 1.0)
    assert plan.variance_s == pytest.approx(0.02 * 0.27 / 0.5)
    minutes = plan.minutes()
    assert plan.power(minutes) == pytest.approx(0.95)
    assert plan.power(minutes / 2) < 0.8
    # A hundred made-up runs of that length: their mean is an estimate with the promised error.
    pairs = round(minutes * 60 / 0.27 * 0.5)
    rng = np.random.default_rng(0)
    means = [100 * (0.1 * rng.normal(size=(pairs, 2)) @ (1, -1)).mean() for _ in range(100)]
    error = plan.standard_error_percent(minutes)
    assert np.std(means) == pytest.approx(error, rel=0.25)
    assert np.mean([mean + 1.645 * error < 1.0 for mean in means]) >= 0.89


def test_layers_add_up_and_an_unknown_spread_is_taken_from_the_widest() -> None:
    spread = {Layer.PATH: 0.14, Layer.TICK: 0.02}
    both = enough.plan(spread, dict.fromkeys((Layer.PATH, Layer.TICK), 0.27), 1.0)
    share = (13 / 16) / (15 / 16)
    expected = 0.14**2 * 0.27 / share / 0.5 + 0.02**2 * 0.27 / (1 - share) / 0.5
    assert both.variance_s == pytest.approx(expected)
    blind = enough.plan({Layer.PATH: 0.14}, LENGTHS, 1.0)
    assert blind.minutes() > both.minutes()


def test_spreads_of_pairs_leave_out_what_is_too_little() -> None:
    noise = 0.1 * np.random.default_rng(0).normal(size=600)
    pairs = pairs_of(("batch",), noise, {}, 0, layers=LAYERS)
    found = enough.spreads(pairs, SECONDS_PER)
    assert found[Layer.PATH] == pytest.approx(0.1 * 2**0.5, rel=0.2)
    assert found[Layer.TICK] == pytest.approx(0.135 * 0.1 * 2**0.5, rel=0.2)
    assert Layer.FLUSH not in enough.spreads([p for p in pairs if p.layer is not Layer.FLUSH], SECONDS_PER)


def together(pairs_noise: float, count: int, seed: int = 0) -> dict[Layer, list[float]]:
    noise = pairs_noise * np.random.default_rng(seed).normal(size=2 * count)
    pairs = pairs_of(("a", "b"), noise, {}, seed, together=1.0)
    assert {p.question for p in pairs} == {Question.TOGETHER}
    return {Layer.PATH: [loss(pair) for pair in pairs]}


def test_it_stops_when_clear_or_out_of_time_and_goes_on_else() -> None:
    noisy = together(0.1, 100)
    going = enough.decide(noisy, [Layer.PATH], 1.0, 60.0, out_of_time=False)
    assert (going.stop, going.why) == (False, "")
    assert going.minutes == pytest.approx((0.141 / 10 * 3.29 / 0.01005) ** 2, rel=0.25)
    assert enough.decide(noisy, [Layer.PATH], 1.0, 60.0, out_of_time=True).why == "time"
    clear = enough.decide(together(0.01, 100), [Layer.PATH], 1.0, 60.0, out_of_time=False)
    assert (clear.stop, clear.why) == (True, "clear")
    assert clear.minutes <= 1.0


@pytest.mark.fault
def test_it_never_calls_a_layer_without_pairs_clear() -> None:
    y = together(0.001, 100)
    assert not enough.decide(y, LAYERS, 1.0, 60.0, out_of_time=False).stop
    assert not enough.decide(y, [], 1.0, 60.0, out_of_time=False).stop
    y[Layer.TICK] = y[Layer.FLUSH] = [0.0] * 7
    assert not enough.decide(y, LAYERS, 1.0, 60.0, out_of_time=False).stop


def test_the_decision_leaves_signs_alone() -> None:
    y = together(0.1, 60)
    flipped = {Layer.PATH: [-value if i % 3 else value for i, value in enumerate(y[Layer.PATH])]}
    for out_of_time in (False, True):
        one, two = (
            enough.decide(found, [Layer.PATH], 1.0, 30.0, out_of_time=out_of_time) for found in (y, flipped)
        )
        assert one == two


def test_minutes_to_settle_are_those_of_the_plan() -> None:
    plan = enough.plan({Layer.PATH: 0.14}, {Layer.PATH: 0.27}, 1.0)
    assert enough.minutes_to_settle(plan.standard_error_percent(3.0), 1.0, 3.0) == pytest.approx(
        plan.minutes()
    )
