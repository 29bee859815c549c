"""The shared queue: bounded, gated, ordered when asked, waits counted whole, nobody left waiting."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.device import Device
from dflash.pipeline.hidden_queue import Buffer, BufferPool, HiddenBatch, SharedHiddenStateQueue
from tests.clock import Clock
from tests.pipeline.parts import make_batch
from tests.waiting import HANG_S, wait_until

EVENT = Device("cpu").event()


def item(index: int, bucket: int = 8) -> HiddenBatch:
    pool = BufferPool()
    batch = make_batch(index, length=bucket)
    return HiddenBatch(batch, torch.empty(0), Buffer(pool, torch.empty(0), None, EVENT))


def make_queue(**changes) -> SharedHiddenStateQueue:
    arguments = {"capacity": 4, "hs_min_ready": 0, "ordered": True, "drafters": 1, "targets": 1} | changes
    return SharedHiddenStateQueue(arguments.pop("capacity"), arguments.pop("hs_min_ready"), **arguments)


def in_thread(body) -> threading.Thread:
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread


def wait_for_a_waiter(condition: threading.Condition) -> None:
    """Somebody waits on it, and has not been woken."""
    wait_until(lambda: condition._waiters)  # type: ignore[attr-defined]


@given(st.permutations(range(12)), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_ordered_mode_gives_each_drafter_its_batches_in_plan_order(order, drafters):
    queue = make_queue(capacity=12, drafters=drafters)
    for index in order:
        assert queue.put(item(index))
    queue.producer_done()
    for drafter in range(drafters):
        got = []
        while (drawn := queue.get(drafter)) is not None:
            got.append(drawn.batch.spec.index)
        assert got == list(range(drafter, 12, drafters))


def test_ordered_mode_keeps_room_for_the_batches_that_are_wanted_next():
    queue = make_queue(capacity=2)
    queue.put(item(1))
    early = in_thread(lambda: queue.put(item(2)))
    wait_until(lambda: queue.producers_waiting == 1)
    assert queue.put(item(0))  # would wait for ever behind batches that nobody may draw before it
    assert queue.depth() == 2
    assert queue.get(0).batch.spec.index == 0
    early.join(HANG_S)
    assert queue.depth() == 2


@pytest.mark.slow
@given(
    drafters=st.integers(1, 3),
    capacity=st.integers(1, 5),
    ready=st.integers(0, 5),
    hands=st.integers(1, 4),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_ordered_mode_is_never_over_full_and_never_stuck(drafters, capacity, ready, hands, data):
    """Targets hold batches of the plan and finish in any order, drafters draw in any order; one thread plays
    all."""
    count = 12 * drafters
    queue = make_queue(capacity=capacity, hs_min_ready=min(ready, capacity), drafters=drafters, targets=hands)
    plan, held, left = iter(range(count)), [], dict.fromkeys(range(drafters), 12)
    held += [next(plan) for _ in range(hands)]
    while any(left.values()):
        ready_to_put = [index for index in held if queue._admits(item(index))]
        may_draw = [drafter for drafter in left if left[drafter] and queue._may_draw(drafter)]
        moves = [("put", index) for index in ready_to_put] + [("draw", drafter) for drafter in may_draw]
        if not moves and not held:
            queue._producers = 0
            continue
        assert moves, f"stuck: held {held}, waiting {sorted(queue._items)}, next {queue._next}"
        move, which = data.draw(st.sampled_from(moves))
        if move == "put":
            queue.put(item(which))
            held.remove(which)
            held += [index for index in [next(plan, None)] if index is not None]
        else:
            assert queue.get(which).batch.spec.index % drafters == which
            left[which] -= 1
        assert queue.depth() <= capacity


def test_put_waits_while_full_and_the_wait_is_counted(clock: Clock):
    queue = make_queue(capacity=1, ordered=False)
    queue.count = True
    queue.put(item(0))
    thread = in_thread(lambda: queue.put(item(1)))
    wait_until(lambda: queue.producers_waiting == 1)
    assert queue.depth() == 1
    assert queue.counters.producer_since_ns[0] == clock.now_ns  # the wait in progress is visible
    clock.advance(0.05)
    queue.get(0)
    thread.join(HANG_S)
    assert queue.depth() == 1
    assert queue.counters.producer_wait_ns == 50_000_000
    assert queue.counters.producer_since_ns[0] == 0


def test_a_drafter_waits_for_min_ready_from_first_want_to_item_in_hand(clock: Clock):
    queue = make_queue(capacity=4, hs_min_ready=3)
    queue.count = True
    got = []
    thread = in_thread(lambda: got.append(queue.get(0)))
    for index in range(3):
        wait_for_a_waiter(queue._changed_for_consumers)
        clock.advance(0.02)
        assert not got
        assert queue.ready_deficit() == 3 - index
        queue.put(item(index))
    thread.join(HANG_S)
    assert got[0].batch.spec.index == 0
    # Two puts woke it in vain; a timer restarted at each would show the last 20 ms only.
    assert queue.counters.consumer_wait_ns == 60_000_000


def test_min_ready_is_waived_when_no_more_will_come():
    queue = make_queue(hs_min_ready=4)
    queue.put(item(0))
    queue.producer_done()
    assert queue.get(0).batch.spec.index == 0
    assert queue.get(0) is None


def test_mixed_mode_mixes_buckets():
    queue = make_queue(capacity=60, ordered=False, seed=3)
    for index in range(60):
        queue.put(item(index, bucket=8 if index < 30 else 16))
    first = [queue.get(0).batch.spec.bucket for _ in range(20)]
    assert 5 <= first.count(8) <= 15


@pytest.mark.parametrize("side", ["put", "get", "take"])
def test_close_ends_every_wait(side):
    queue = make_queue(capacity=1)
    pool = BufferPool()
    queue.put(item(0))
    results = []
    waits = {
        "put": lambda: queue.put(item(2)),
        "get": lambda: queue.get(0) and queue.get(0),
        "take": pool.take,
    }
    conditions = {"put": queue._changed_for_producers, "get": queue._changed_for_consumers}
    thread = in_thread(lambda: results.append(waits[side]()))
    wait_for_a_waiter(conditions.get(side, pool._condition))
    queue.close()
    pool.close()
    thread.join(HANG_S)
    assert not thread.is_alive()
    assert not results[0]


def test_signals_for_the_monitor(clock: Clock):
    queue = make_queue(hs_min_ready=3)
    assert queue.oldest_ns() is None
    queue.put(item(0, 8))
    first_ns = clock.now_ns
    clock.advance(1.0)
    queue.put(item(1, 16))
    assert queue.depth() == 2
    assert queue.bucket_depths() == {8: 1, 16: 1}
    assert queue.oldest_ns() == first_ns
    assert queue.ready_deficit() == 1


def test_switch_off_takes_no_waits(clock: Clock):
    queue = make_queue()
    thread = in_thread(lambda: queue.get(0))
    wait_for_a_waiter(queue._changed_for_consumers)
    clock.advance(0.02)
    queue.put(item(0))
    thread.join(HANG_S)
    assert queue.counters.consumer_wait_ns == 0


def test_a_queue_stands_full_only_while_every_producer_waits_with_a_batch_in_hand():
    queue = make_queue(capacity=1, ordered=False, targets=2)
    queue.put(item(0))
    assert not queue.stands_full(2)  # full, but nobody waits
    threads = [in_thread(lambda index=index: queue.put(item(index))) for index in (1, 2)]
    wait_until(lambda: queue.stands_full(2))
    assert not queue.stands_full(3)
    queue.get(0)
    assert not queue.stands_full(2), "a draw ends it before any producer has run"
    queue.get(0)
    for thread in threads:
        thread.join(HANG_S)
    assert queue.producers_waiting == 0
    queue.close()


def test_a_closed_queue_leaves_no_producer_counted_as_waiting():
    queue = make_queue(capacity=1, ordered=False)
    queue.put(item(0))
    thread = in_thread(lambda: queue.put(item(1)))
    wait_until(lambda: queue.producers_waiting == 1)
    queue.close()
    thread.join(HANG_S)
    assert queue.producers_waiting == 0
