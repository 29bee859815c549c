"""From the pairs of a run to what is judged, for every kind of run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from steptime.records.pairs import ALL, Layer, Question
from steptime.records.types import slowdown_percent
from steptime.statistics.judging import Budgets
from steptime.statistics.observed import observe
from tests.steptime.statistics.pairs import SECONDS_PER, pairs_of

SWITCHES = ("batch", "losses", "grads")
LAYERS = tuple(Layer)


def noise(halves: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.asarray(0.02 * np.random.default_rng(4).normal(size=halves))


def test_a_run_of_everything() -> None:
    pairs = pairs_of(SWITCHES, noise(1200), {"batch": 0.01, "grads": 0.02}, 1, layers=LAYERS)
    found = observe(pairs, SWITCHES, SECONDS_PER, Budgets())
    assert tuple(found.collectors) == SWITCHES
    assert found.all is not None
    assert found.placebo is not None
    assert found.incomplete == ()
    # 1% and 2% in each of three layers.
    for estimate, truth in (
        (found.collectors["batch"], 0.03),
        (found.collectors["losses"], 0.0),
        (found.all, 0.09),
        (found.placebo, 0.0),
    ):
        assert abs(estimate.percent - slowdown_percent(truth)) < 3 * estimate.standard_error
    assert found.squares[ALL][0] == pytest.approx(found.all.percent, abs=4 * found.all.standard_error)
    assert found.losses_equal is None


def test_a_single_collector_is_all_of_them() -> None:
    pairs = pairs_of(("batch",), noise(400), {"batch": 0.02}, 1)
    found = observe(pairs, ("batch",), {Layer.PATH: 0.0}, Budgets(1.0, 0.5))
    assert found.all is not None
    assert found.all.percent == found.collectors["batch"].percent == pytest.approx(2.0, abs=0.5)
    assert found.all.p_over > found.collectors["batch"].p_over or found.all.p_over < 0.01
    assert found.incomplete == ()


def test_a_run_that_asks_about_all_as_one() -> None:
    pairs = pairs_of(SWITCHES, noise(400), {"batch": 0.02}, 1, together=1.0)
    found = observe(pairs, SWITCHES, {Layer.PATH: 0.0}, Budgets(), only_together=True)
    assert found.collectors == {}
    assert found.all is not None
    assert found.placebo is not None
    assert found.incomplete == ()


@pytest.mark.fault
def test_too_few_pairs_of_any_layer_and_question_are_named() -> None:
    pairs = pairs_of(SWITCHES, noise(300), {}, 1, layers=LAYERS)
    few = [p for p in pairs if p.layer is not Layer.FLUSH or p.question is Question.TOGETHER]
    found = observe(few, SWITCHES, SECONDS_PER, Budgets())
    assert found.collectors == {}
    assert found.all is not None
    assert found.incomplete == (
        "incomplete: 0 pairs of the layer 'flush' for each collector, at least 8 are needed",
    )
    assert len(observe([], SWITCHES, SECONDS_PER, Budgets()).incomplete) == 6


@pytest.mark.fault
def test_losses_are_equal_only_when_every_pair_says_so() -> None:
    pairs = [replace(p, losses_equal=True) for p in pairs_of(SWITCHES, noise(100), {}, 1)]
    path = {Layer.PATH: 0.0}
    assert observe(pairs, SWITCHES, path, Budgets()).losses_equal is True
    silent = [replace(pairs[0], losses_equal=None), *pairs[1:]]
    assert observe(silent, SWITCHES, path, Budgets()).losses_equal is None
    differing = [replace(silent[1], losses_equal=False), *silent]
    assert observe(differing, SWITCHES, path, Budgets()).losses_equal is False
