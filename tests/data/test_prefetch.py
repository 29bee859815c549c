from __future__ import annotations

import threading

import numpy as np
import pytest

from dflash.data.anchors import BlockGeometry
from dflash.data.batch import Sample
from dflash.data.collate import Collator
from dflash.data.dataset import Dataset
from dflash.data.plan import EpochPlan
from dflash.data.prefetch import BatchPrefetcher
from tests.waiting import HANG_S, wait_until

LENGTHS = [5, 9, 16, 30, 12, 7]


@pytest.fixture
def parts():
    rows = [
        Sample(np.arange(1, length + 1, dtype=np.int32), np.arange(length) > 1, f"f:{length}")
        for length in LENGTHS
    ]
    return EpochPlan(LENGTHS, (16, 32), 2, 0), Collator(Dataset(rows), BlockGeometry(4, 4))


def drain(prefetcher):
    batches = []
    while (batch := prefetcher.get()) is not None:
        batches.append(batch)
    return batches


def test_plan_order_start_and_stop(parts):
    prefetcher = BatchPrefetcher(*parts, depth=3, start_index=4, stop_index=11)
    prefetcher.start()
    assert [batch.spec.index for batch in drain(prefetcher)] == list(range(4, 11))
    assert prefetcher.get() is None
    assert prefetcher.join(HANG_S)


def test_never_more_than_depth(parts):
    plan, collate = parts
    built, hold = [], threading.Event()

    def build(spec):
        built.append(spec.index)
        assert spec.index < 4 or hold.wait(HANG_S)
        return collate(spec)

    prefetcher = BatchPrefetcher(plan, build, 3)
    prefetcher.start()
    wait_until(prefetcher.stands_full)
    assert prefetcher.depth_now() == prefetcher.capacity == 3
    assert len(built) == 4  # one more is in the thread's hands
    assert prefetcher.stands_full()
    assert prefetcher.get() is not None
    assert not prefetcher.stands_full()
    wait_until(lambda: prefetcher.depth_now() == 3)
    assert not prefetcher.stands_full(), "full again, and still building"
    hold.set()
    wait_until(prefetcher.stands_full)
    prefetcher.close()
    assert prefetcher.join(HANG_S)


def test_several_consumers_get_each_batch_once(parts):
    prefetcher = BatchPrefetcher(*parts, depth=2, stop_index=60)
    taken: list[list[int]] = [[], [], []]

    def consume(own):
        own.extend(batch.spec.index for batch in drain(prefetcher))

    threads = [threading.Thread(target=consume, args=(own,)) for own in taken]
    for thread in threads:
        thread.start()
    prefetcher.start()
    for thread in threads:
        thread.join(HANG_S)
    assert sorted(index for own in taken for index in own) == list(range(60))
    assert all(own == sorted(own) for own in taken)


def test_counters_are_those_of_the_batches(parts):
    prefetcher = BatchPrefetcher(*parts, depth=2, stop_index=9, longest=32)
    prefetcher.counters.count = True
    prefetcher.start()
    batches = drain(prefetcher)
    counters = prefetcher.counters
    assert counters.batches == 9
    for name in ("tokens", "padded_tokens", "loss_tokens", "supervised_slots"):
        assert getattr(counters, name) == sum(getattr(batch, name) for batch in batches)
    assert counters.samples == sum(counters.length_bins) == 18
    assert counters.length_bins[30 - 1] == sum(batch.lengths.count(30) for batch in batches)


def test_counters_off_stand_still(parts):
    prefetcher = BatchPrefetcher(*parts, depth=2, stop_index=4)
    prefetcher.start()
    drain(prefetcher)
    assert (
        prefetcher.counters.batches == prefetcher.counters.tokens == sum(prefetcher.counters.length_bins) == 0
    )


def test_fault_is_reported_once_and_nobody_hangs(parts):
    plan, collate = parts
    told = []

    def faulty(spec):
        if spec.index == 3:
            raise ZeroDivisionError("planted")
        return collate(spec)

    prefetcher = BatchPrefetcher(plan, faulty, 2, on_error=told.append)
    results = []
    waiting = [threading.Thread(target=lambda: results.append(drain(prefetcher))) for _ in range(3)]
    for thread in waiting:
        thread.start()
    prefetcher.start()
    for thread in waiting:
        thread.join(HANG_S)
    assert not any(thread.is_alive() for thread in waiting)
    assert [str(error) for error in told] == ["planted"]
    assert told[0].__traceback__ is not None
    assert prefetcher.join(HANG_S)


def test_close_wakes_everyone_and_may_come_at_any_time(parts):
    for when in ("before start", "full", "empty"):
        plan, collate = parts
        gate = threading.Event()
        held = when == "empty"

        def build(spec, gate=gate, collate=collate, held=held):
            assert not held or gate.wait(HANG_S)
            return collate(spec)

        prefetcher = BatchPrefetcher(plan, build, 1)
        result = []
        reader = threading.Thread(target=lambda p=prefetcher, r=result: r.append(p.get()))
        if when == "before start":
            prefetcher.close()
            reader.start()
            prefetcher.start()
        elif when == "empty":
            prefetcher.start()
            reader.start()
            wait_until(lambda p=prefetcher: p._filled._waiters)
            prefetcher.close()
            reader.join(HANG_S)
            gate.set()
        else:
            prefetcher.start()
            wait_until(prefetcher.depth_now)
            prefetcher.close()
            reader.start()
        reader.join(HANG_S)
        assert result == [None], when
        assert prefetcher.join(HANG_S)
        prefetcher.close()


def test_join_without_start_returns_at_once(parts):
    assert BatchPrefetcher(*parts, depth=1).join(HANG_S)


def test_recorder_gets_its_share(parts):
    from dflash.device import Device
    from dflash.observe.recorder import WorkerRecorder

    recorder = WorkerRecorder("prefetcher", 0, Device("cpu"))
    recorder.count = True
    prefetcher = BatchPrefetcher(*parts, depth=2, stop_index=5, recorder=recorder)
    prefetcher.start()
    batches = drain(prefetcher)
    prefetcher.join(HANG_S)
    assert (recorder.batches, recorder.samples, recorder.step) == (5, 10, 4)
    assert recorder.tokens == sum(batch.tokens for batch in batches)
    assert recorder.busy_ns > 0
    assert recorder.wait_out_since_ns == 0
