"""From a worker's ring to quantiles: where a value falls, what a reader takes, and that nothing is lost
between two threads."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.observe.histogram import RING, SpanReader, Window, bucket_edges_ns, bucket_of, quantiles_ns
from dflash.observe.recorder import StageTimer
from tests.waiting import HANG_S, wait_until

durations = st.integers(min_value=0, max_value=2**63 - 1)


@given(durations)
def test_a_value_lies_between_the_edges_of_its_bucket(value: int) -> None:
    low, high = bucket_edges_ns(bucket_of(value))
    assert low <= value < high
    assert high - low <= max(1, value / 8)


def test_buckets_follow_each_other_without_a_gap() -> None:
    edges = [bucket_edges_ns(bucket) for bucket in range(16 + 8 * 59)]
    assert all(before[1] == after[0] for before, after in itertools.pairwise(edges))
    assert edges[0][0] == 0
    assert edges[-1][1] == 2**63


@given(st.lists(st.integers(min_value=1, max_value=10**12), min_size=1, max_size=300))
def test_statistics_are_near_the_exact_ones(values: list[int]) -> None:
    timer = StageTimer("x")
    for value in values:
        timer.add(value)
    window = SpanReader(timer).read()
    assert window is not None
    found = window.statistics_ms()
    assert found["count"] == len(values)
    assert found["mean"] == pytest.approx(sum(values) / len(values) / 1e6)
    assert found["max"] == pytest.approx(max(values) / 1e6)
    for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        exact = np.quantile(values, share, method="inverted_cdf") / 1e6
        assert abs(found[name] - exact) <= exact / 8 + 1e-6, name
    assert found["p50"] <= found["p95"] <= found["p99"] <= found["max"]


def test_nothing_recorded_has_no_statistics() -> None:
    assert Window().statistics_ms() == {}
    assert SpanReader(StageTimer("x")).read() is None


def test_quantiles_of_one_bucket_rise_inside_it() -> None:
    bucket = bucket_of(1000)
    low, high = bucket_edges_ns(bucket)
    p10, p90 = quantiles_ns({bucket: 10}, (0.1, 0.9))
    assert low < p10 < p90 < high


def test_a_reading_covers_only_what_came_since_the_last() -> None:
    timer = StageTimer("x")
    reader = SpanReader(timer)
    timer.add(5_000_000)
    first = reader.read()
    assert first is not None
    assert first.max_ns == 5_000_000
    timer.add(1_000_000)
    second = reader.read()
    assert second is not None
    assert (sum(second.counts.values()), second.sum_ns, second.max_ns) == (1, 1_000_000, 1_000_000)
    assert reader.read() is None


@pytest.mark.parametrize("before", [0, 1, RING - 2, RING, 3 * RING + 7])
@pytest.mark.parametrize("new", [1, 2, RING - 1, RING])
def test_readings_are_right_wherever_the_ring_stands(before: int, new: int) -> None:
    timer = StageTimer("x")
    reader = SpanReader(timer)
    for value in range(before):
        timer.add(value)
    reader.read()
    for value in range(1, new + 1):
        timer.add(value * 1000)
    window = reader.read()
    assert window is not None
    assert (window.sum_ns, window.max_ns, window.missed) == (1000 * new * (new + 1) // 2, 1000 * new, 0)


def test_more_spans_than_the_ring_holds_are_counted_and_the_last_ones_described() -> None:
    timer = StageTimer("x")
    reader = SpanReader(timer)
    for value in (1_000_000, 2_000_000, 3_000_000):
        for _ in range(RING):
            timer.add(value)
    window = reader.read()
    assert window is not None
    assert window.missed == 2 * RING
    found = window.statistics_ms()
    assert (found["count"], found["mean"], found["max"]) == (3 * RING, 3.0, 3.0)


def test_windows_merge_exactly() -> None:
    one, two = StageTimer("x"), StageTimer("y")
    for value in (3_000, 40_000):
        one.add(value)
    two.add(500_000)
    merged = Window()
    for timer in (one, two):
        window = SpanReader(timer).read()
        assert window is not None
        merged.add(window)
    assert (sum(merged.counts.values()), merged.sum_ns, merged.max_ns) == (3, 543_000, 500_000)


def test_a_reader_beside_a_busy_writer_loses_nothing() -> None:
    """The writer stays within the ring, as a stage does; every span and every maximum arrives once."""
    timer = StageTimer("x")
    reader = SpanReader(timer)
    spans, top = 30_000, 10_000_000
    values = [top if index % 1000 == 500 else 1 + index % 997 for index in range(spans)]
    seen = threading.Semaphore(RING // 2)

    def write() -> None:
        for value in values:
            seen.acquire()
            timer.add(value)

    writer = threading.Thread(target=write)
    writer.start()
    total = Window()

    def all_read() -> bool:
        window = reader.read()
        if window is not None:
            total.add(window)
            seen.release(sum(window.counts.values()))
        return sum(total.counts.values()) >= spans

    wait_until(all_read)
    writer.join(HANG_S)
    assert sum(total.counts.values()) == spans
    assert total.sum_ns == sum(values)
    assert total.counts[bucket_of(top)] == spans // 1000
    assert (total.max_ns, total.missed) == (top, 0)
