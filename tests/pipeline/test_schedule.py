"""The learning rate's shape."""

from __future__ import annotations

import pytest

from dflash.config import TrainConfig
from dflash.pipeline.schedule import learning_rate


def test_rises_then_falls_to_the_floor():
    config = TrainConfig(steps=100, lr=1.0, warmup=0.1, min_lr_ratio=0.1)
    rates = [learning_rate(step, config) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.1)
    assert rates[55] == pytest.approx(0.55, abs=0.01)


def test_no_warm_up_starts_at_the_peak():
    assert learning_rate(0, TrainConfig(steps=10, lr=1.0, warmup=0.0)) == 1.0


def test_rate_zero_stays_zero():
    assert {learning_rate(step, TrainConfig(steps=10, lr=0.0)) for step in range(10)} == {0.0}
