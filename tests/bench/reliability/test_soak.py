"""Drift by block means: planted leaks are found, noise that remembers is not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.reliability.soak import Sample, drift, judge, last_step, page


def samples(
    *,
    leak: float = 0.0,
    slower: float = 0.0,
    threads: int = 0,
    noise: float = 0.0,
    seed: int = 0,
    n: int = 300,
) -> list[Sample]:
    """A run of 300 looks whose memory grows by a share `leak`, whose rate falls by `slower`, and which starts
    so many threads more."""
    generator = np.random.default_rng(seed)
    found, level, step = [], 0.0, 0.0
    for i in range(n):
        level = 0.9 * level + noise * generator.standard_normal()
        step += 5.0 * 8.0 * (1.0 - slower * i / n) * (1.0 + level)
        rss = 1e9 * (1.0 + leak * i / n + level)
        found.append(Sample(5.0 * (i + 1), int(rss), 12 + threads * i // n, int(step)))
    return found


def test_a_flat_run_is_flat() -> None:
    verdict = judge(samples(noise=0.002))
    assert verdict.faults == ()
    assert abs(verdict.memory.percent) < 2.0


@pytest.mark.fault
@pytest.mark.parametrize(
    ("plant", "said"),
    [
        ({"leak": 0.05, "noise": 0.001}, "memory grows by"),
        ({"slower": 0.1, "noise": 0.002}, "the rate changes by -"),
        ({"threads": 3}, "threads: 12 at first, 14 at last"),
    ],
)
def test_a_planted_drift_is_found(plant: dict, said: str) -> None:
    (fault,) = judge(samples(**plant)).faults
    assert said in fault


@pytest.mark.fault
def test_a_run_that_stands_still_is_no_flat_run() -> None:
    still = [Sample(5.0 * (i + 1), 10**9, 12, 7 if i else 6) for i in range(300)]
    with np.errstate(all="ignore"):
        assert "no step was made" in judge(still).faults


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_noise_that_remembers_is_seldom_a_drift(seed: int) -> None:
    """The interval of a drift of nothing, under noise of correlation 0.9, is not absurdly narrow."""
    generator, level, values = np.random.default_rng(seed), 0.0, []
    for _ in range(400):
        level = 0.9 * level + generator.standard_normal()
        values.append(1000.0 + level)
    found = drift(list(range(400)), values)
    assert found.low - (found.high - found.low) < 0 < found.high + (found.high - found.low)


@pytest.mark.fault
def test_too_few_looks_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        drift([1.0, 2.0], [1.0, 2.0])


def test_the_last_step_is_read_from_the_end_of_the_file(tmp_path) -> None:
    rows = tmp_path / "metrics.jsonl"
    assert last_step(rows) == -1
    rows.write_text('{"step": 1}\n{"step": 2, "x": 1}\n{"kind": "event"}\n{"step": 3')
    assert last_step(rows) == 2


def test_the_page_says_what_is_not_flat() -> None:
    leaking = samples(leak=0.05)
    text = page(leaking, judge(leaking), 143, 0)
    assert "NOT FLAT: memory grows" in text
    assert "NOT FLAT" not in page(samples(noise=0.001), judge(samples(noise=0.001)), 143, 0)
