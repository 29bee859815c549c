"""The shared queue of hidden states between target workers and drafter workers."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch

from dflash.data.batch import Batch
from dflash.pipeline.even_draws import EvenDraws

_PATIENCE = 8
"""A batch of a rare length is drawn at the latest when so many times the capacity were drawn before it."""


@dataclass(slots=True)
class HiddenBatch:
    """A batch with its target's hidden states.

    Attributes:
        features: `[batch, length, taps*hidden]` in `buffer`, on the target's device or in pinned host memory.
        buffer: one of the target's; to be read behind its `ready`, and given back behind the last read.
        target: index of the target.
        last_hidden: `[batch, length, hidden]` output of the target's last norm, for distillation only.
        put_ns: host clock when it entered the queue, which writes it.
        drawn_before: batches that had left the queue by then; likewise.
    """

    batch: Batch
    features: torch.Tensor
    buffer: Buffer
    target: int = 0
    last_hidden: torch.Tensor | None = None
    put_ns: int = field(default=0, init=False)
    drawn_before: int = field(default=0, init=False)


class Buffer:
    """One preallocated buffer, and the two events that order who writes it and who reads it.

    Attributes:
        memory, last: room for the features and the last hidden states of the largest batch.
        ready: recorded by the writer behind its last write.
        freed: recorded by the last reader behind its last read, on its own device (an event belongs to one);
            the writer waits for it. None before the first use.
    """

    __slots__ = ("freed", "last", "memory", "pool", "ready")

    def __init__(
        self, pool: BufferPool | None, memory: torch.Tensor, last: torch.Tensor | None, ready: Any
    ) -> None:
        self.pool, self.memory, self.last, self.ready = pool, memory, last, ready
        self.freed: Any = None

    def release(self) -> None:
        """Give the buffer back to its pool; `freed` must be set."""
        assert self.pool is not None
        self.pool.put(self)


class BufferPool:
    """A target worker's buffers. Taking waits on the host until a drafter gives one back."""

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        self._condition = threading.Condition()
        self._closed = self._waiting = False

    def put(self, buffer: Buffer) -> None:
        with self._condition:
            self._buffers.append(buffer)
            self._condition.notify()

    def take(self) -> Buffer | None:
        """A free buffer; None once closed."""
        with self._condition:
            while not self._buffers and not self._closed:
                self._waiting = True
                self._condition.wait()
            self._waiting = False
            return None if self._closed else self._buffers.pop()

    def starved(self) -> bool:
        """The worker waits for a buffer, until a drafter gives one back."""
        return self._waiting and not self._buffers

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()


@dataclass
class QueueCounters:
    """What the `pipeline` collector reads. Written under the queue's lock, read without it; ints only grow.

    Attributes:
        consumer_wait_ns, producer_wait_ns: finished waits, from first want to item in hand (or put done).
        consumer_since_ns, producer_since_ns: start of the wait in progress for each worker, 0 when none.
    """

    put_count: int = 0
    get_count: int = 0
    consumer_wait_ns: int = 0
    producer_wait_ns: int = 0
    consumer_since_ns: dict[int, int] = field(default_factory=dict)
    producer_since_ns: dict[int, int] = field(default_factory=dict)


class SharedHiddenStateQueue:
    """Bounded queue, bucketed by padded length.

    A drafter draws only when `hs_min_ready` batches wait, or no more will come. Two ways of drawing:

    * mixed: a random one of the waiting batches, but of equal work for all drafters of a step (`EvenDraws`);
    * ordered: drafter d of D gets batches d, d+D, d+2D... of the plan, whatever the threads do.

    Args:
        capacity: batches that may wait. In ordered mode those are the next so many of the plan, so there is
            always room for the batch that a drafter needs next, though it come last from a slow target.
        drafters, targets: number of workers on each side.
        per_step: batches that each drafter draws for one optimizer step.
        first_index: plan index of the first batch (ordered mode).
        stride: plan indices from one batch of a drafter to its next (ordered mode); the number of drafters,
            of all ranks where there are several.

    Attributes:
        producers_waiting: target workers that hold a finished batch and wait for room, as of the last change.
    """

    def __init__(
        self,
        capacity: int,
        hs_min_ready: int,
        *,
        ordered: bool,
        drafters: int,
        targets: int,
        per_step: int = 1,
        first_index: int = 0,
        stride: int | None = None,
        seed: int = 0,
    ) -> None:
        self.capacity, self.hs_min_ready, self.ordered = capacity, hs_min_ready, ordered
        self.counters = QueueCounters()
        self.count = False
        self.producers_waiting = 0
        self._drafters, self._producers, self._stride = drafters, targets, stride or drafters
        self._next = {drafter: first_index + drafter for drafter in range(drafters)}
        self._items: OrderedDict[int, HiddenBatch] = OrderedDict()
        self._draws = EvenDraws(drafters, per_step, seed)
        self._closed = False
        lock = threading.Lock()
        self._changed_for_consumers = threading.Condition(lock)
        self._changed_for_producers = threading.Condition(lock)

    # -- the producers' side ---------------------------------------------------------------------------------

    def put(self, item: HiddenBatch, target: int = 0) -> bool:
        """Hand over a batch; waits while the queue is full. False once closed."""
        with self._changed_for_producers:
            if not self._admits(item) and not self._closed:
                since = time.perf_counter_ns()
                if self.count:
                    self.counters.producer_since_ns[target] = since
                self.producers_waiting += 1
                while not self._admits(item) and not self._closed:
                    self._changed_for_producers.wait()
                self.producers_waiting -= 1
                if self.count:
                    self.counters.producer_since_ns[target] = 0
                    self.counters.producer_wait_ns += time.perf_counter_ns() - since
            if self._closed:
                return False
            item.put_ns = time.perf_counter_ns()
            item.drawn_before = self.counters.get_count
            self._items[item.batch.spec.index] = item
            self.counters.put_count += 1
            self._changed_for_consumers.notify_all()
            return True

    def producer_done(self) -> None:
        """A target worker will put no more."""
        with self._changed_for_consumers:
            self._producers -= 1
            self._changed_for_consumers.notify_all()

    def _admits(self, item: HiddenBatch) -> bool:
        if not self.ordered:
            return len(self._items) < self.capacity
        # Batches of the plan before this one that nobody has drawn yet: a drafter draws every `stride`-th
        # from its next one on.
        index, stride = item.batch.spec.index, self._stride
        return sum(max(0, -(-(index - first) // stride)) for first in self._next.values()) < self.capacity

    # -- the consumers' side ---------------------------------------------------------------------------------

    def get(self, drafter: int) -> HiddenBatch | None:
        """The next batch for this drafter; None once closed, or when the producers are done and nothing is
        left."""
        with self._changed_for_consumers:
            if not self._may_draw(drafter):
                since = time.perf_counter_ns()
                if self.count:
                    self.counters.consumer_since_ns[drafter] = since
                while not self._may_draw(drafter):
                    if self._closed or (self._producers <= 0 and not self._left(drafter)):
                        break
                    self._changed_for_consumers.wait()
                if self.count:
                    self.counters.consumer_since_ns[drafter] = 0
                    self.counters.consumer_wait_ns += time.perf_counter_ns() - since
            if self._closed or not self._may_draw(drafter):
                return None
            index = self._next[drafter] if self.ordered else self._mixed(drafter)
            self._next[drafter] += self._stride
            item = self._items.pop(index)
            self.counters.get_count += 1
            # Every producer looks again: in ordered mode only one of them may hold the batch that is wanted
            # next.
            self._changed_for_producers.notify_all()
            return item

    def _mixed(self, drafter: int) -> int:
        # The last batch of each target may still be under way on its device, where the drafter's would wait.
        items = self._items.values()
        last = {item.target: item for item in items}
        waiting = [item for item in items if item is not last[item.target]]
        if len(waiting) < self._drafters:
            waiting = list(items)
        age = self.counters.get_count - waiting[0].drawn_before
        sizes = [item.batch.padded_tokens for item in waiting]
        place = self._draws.choose(drafter, sizes, overdue=age > _PATIENCE * self.capacity)
        return waiting[place].batch.spec.index

    def _may_draw(self, drafter: int) -> bool:
        if self._closed or not self._left(drafter):
            return False
        return self._producers <= 0 or len(self._items) >= self.hs_min_ready

    def _left(self, drafter: int) -> bool:
        return self._next[drafter] in self._items if self.ordered else bool(self._items)

    # -- both ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End every wait."""
        with self._changed_for_consumers:
            self._closed = True
            self._changed_for_consumers.notify_all()
            self._changed_for_producers.notify_all()

    # -- what the monitor reads, without the lock ------------------------------------------------------------

    def depth(self) -> int:
        """Batches waiting."""
        return len(self._items)

    def stands_full(self, producers: int) -> bool:
        """It is full and `producers` target workers wait with the next batch in hand, until a drafter draws.

        A draw makes it false at once, not only when the woken producer runs.
        """
        return self.producers_waiting == producers and len(self._items) >= self.capacity

    def ready_deficit(self) -> int:
        """Batches missing before a drafter may draw."""
        return max(0, self.hs_min_ready - len(self._items))

    def bucket_depths(self) -> dict[int, int]:
        """Waiting batches by padded length, tokens."""
        depths: dict[int, int] = {}
        for item in self._snapshot():
            bucket = item.batch.spec.bucket
            depths[bucket] = depths.get(bucket, 0) + 1
        return depths

    def oldest_ns(self) -> int | None:
        """`perf_counter_ns` at which the oldest waiting batch was put; None when the queue is empty."""
        return min((item.put_ns for item in self._snapshot()), default=None)

    def _snapshot(self) -> list[HiddenBatch]:
        for _ in range(8):
            try:
                return list(self._items.values())
            except (
                RuntimeError
            ):  # a worker changed it while we looked; the monitor may look again, a worker must not wait
                continue
        return []
