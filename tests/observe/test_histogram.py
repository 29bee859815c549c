"""Log-buckets: where a value falls, what a reader takes, and that nothing is lost between two threads."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.observe.histogram import (
    BUCKETS,
    FIRST_BUCKET,
    HistogramReader,
    Window,
    bucket_edges_ns,
    bucket_of,
    new_cells,
    quantiles_ns,
)
from dflash.observe.recorder import StageTimer

durations = st.integers(min_value=0, max_value=2**63 - 1)


@given(durations)
def test_a_value_lies_between_the_edges_of_its_bucket(value: int) -> None:
    bucket = bucket_of(value)
    low, high = bucket_edges_ns(bucket)
    assert low <= value < high
    assert high - low <= max(1, value / 8)
    assert bucket < BUCKETS


def test_buckets_follow_each_other_without_a_gap() -> None:
    edges = [bucket_edges_ns(bucket) for bucket in range(BUCKETS)]
    assert all(before[1] == after[0] for before, after in itertools.pairwise(edges))
    assert edges[0][0] == 0
    assert edges[-1][1] == 2**63


@given(durations)
def test_the_recorder_has_the_same_buckets(value: int) -> None:
    timer = StageTimer("x")
    timer.add(value)
    assert timer.cells.index(1, FIRST_BUCKET) == FIRST_BUCKET + bucket_of(value)
    assert len(timer.cells) == len(new_cells())


@given(st.lists(st.integers(min_value=1, max_value=10**12), min_size=1, max_size=300))
def test_statistics_are_near_the_exact_ones(values: list[int]) -> None:
    timer = StageTimer("x")
    reader = HistogramReader(timer)
    for value in values:
        timer.add(value)
    found = reader.read().statistics_ms()
    assert found["count"] == len(values)
    assert found["mean"] == pytest.approx(sum(values) / len(values) / 1e6)
    assert found["max"] == pytest.approx(max(values) / 1e6)
    for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        exact = np.quantile(values, share, method="inverted_cdf") / 1e6
        assert abs(found[name] - exact) <= exact / 8 + 1e-6, name
    assert found["p50"] <= found["p95"] <= found["p99"] <= found["max"]


def test_nothing_recorded_has_no_statistics() -> None:
    assert Window().statistics_ms() == {}
    assert HistogramReader(StageTimer("x")).read().statistics_ms() == {}


def test_quantiles_of_one_bucket_rise_inside_it() -> None:
    bucket = bucket_of(1000)
    low, high = bucket_edges_ns(bucket)
    p10, p90 = quantiles_ns({bucket: 10}, (0.1, 0.9))
    assert low < p10 < p90 < high


def test_a_reading_covers_only_what_came_since_the_last() -> None:
    timer = StageTimer("x")
    reader = HistogramReader(timer)
    timer.add(5_000_000)
    assert reader.read().max_ns == 5_000_000
    timer.add(1_000_000)
    second = reader.read()
    assert (second.count, second.sum_ns, second.max_ns) == (1, 1_000_000, 1_000_000)
    assert reader.read().count == 0


def test_a_maximum_stored_late_into_the_old_slot_is_found_by_the_next_reading() -> None:
    timer = StageTimer("x")
    reader = HistogramReader(timer)
    stale = timer.slot
    timer.add(10)
    reader.read()
    # A writer that had read `slot` before the reader turned it: what it does last is this store.
    timer.cells[stale] = 999
    assert reader.read().max_ns == 999
    assert reader.read().max_ns == 0


def test_windows_merge_exactly() -> None:
    one, two = StageTimer("x"), StageTimer("y")
    readers = HistogramReader(one), HistogramReader(two)
    for value in (3_000, 40_000):
        one.add(value)
    two.add(500_000)
    merged = Window()
    for reader in readers:
        merged.add(reader.read())
    assert (merged.count, merged.sum_ns, merged.max_ns) == (3, 543_000, 500_000)


def test_a_reader_beside_a_busy_writer_loses_nothing() -> None:
    timer = StageTimer("x")
    reader = HistogramReader(timer)
    spans, top = 60_000, 10_000_000
    done = threading.Event()

    def write() -> None:
        for index in range(spans):
            timer.add(top if index % 1000 == 500 else 1 + index % 997)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    windows = []
    while not done.is_set():
        windows.append(reader.read())
    writer.join()
    windows += [reader.read(), reader.read()]
    assert sum(window.count for window in windows) == spans
    assert sum(window.sum_ns for window in windows) == timer.cells[2]
    assert max(window.max_ns for window in windows) == top
    # A window that holds a longest span says so, at the latest one reading after.
    for window, after in itertools.pairwise(windows):
        if bucket_of(top) in window.counts:
            assert top in (window.max_ns, after.max_ns)
