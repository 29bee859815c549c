"""pipeline: the four signals of the shared queue, and how full the prefetcher is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, ClassVar

from dflash.observe.accounting import cost_ns
from dflash.observe.collectors.base import Collector, Sources
from dflash.observe.metric import Metric

_QUEUE = "counters of the shared queue"


@dataclass(frozen=True)
class _Counts:
    puts: int
    gets: int
    consumer_wait_ns: int
    producer_wait_ns: int


class PipelineCollector(Collector):
    """The four signals of the shared queue (depth, age, both waits), how mixed it is, and how full the
    prefetcher is. A batch counts from when its work is enqueued on the target's GPU, not from when it is
    done: a drafter that draws it waits for the rest on its own GPU. Over a long run both come to the same.

    Reads the queue's counters; the queue's own switch turns its wait clocks on and off.
    """

    name = "pipeline"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            "pipeline/hs_queue_depth", "batches", "instant", "batches that wait in the shared queue", _QUEUE
        ),
        Metric("pipeline/hs_queue_fill_ratio", "1", "ratio", "depth over capacity", _QUEUE),
        Metric(
            "pipeline/hs_ready_deficit",
            "batches",
            "instant",
            "batches missing until a drafter may draw",
            _QUEUE,
        ),
        Metric(
            "pipeline/hs_bucket_nonempty_count",
            "buckets",
            "instant",
            "length buckets with a batch in them",
            _QUEUE,
        ),
        Metric(
            "pipeline/hs_bucket_entropy",
            "bits",
            "instant",
            "how mixed the waiting lengths are; 0: one bucket only",
            _QUEUE,
        ),
        Metric(
            "pipeline/hs_oldest_age_s",
            "s",
            "instant",
            "age of the oldest waiting batch; absent when empty",
            _QUEUE,
        ),
        Metric(
            "pipeline/consumer_wait_s",
            "s",
            "delta",
            "time drafters waited, from first want to batch in hand, summed over drafters, the wait in "
            "progress included",
            _QUEUE,
        ),
        Metric(
            "pipeline/producer_wait_s",
            "s",
            "delta",
            "time targets waited for room, summed over targets, the wait in progress included",
            _QUEUE,
        ),
        Metric("pipeline/put_batches", "batches", "delta", "batches that targets put in", _QUEUE),
        Metric("pipeline/get_batches", "batches", "delta", "batches that drafters took out", _QUEUE),
        Metric(
            "pipeline/target_to_drafter_batch_ratio",
            "1",
            "ratio",
            "batches put in for each taken out; over 1 the queue fills; absent when none was taken",
            _QUEUE,
            weight="pipeline/get_batches",
        ),
        Metric(
            "pipeline/prefetch_fill_ratio",
            "1",
            "ratio",
            "batches ready in the prefetcher over its depth",
            "the prefetcher's queue",
        ),
    )

    def __init__(self, sources: Sources) -> None:
        super().__init__(sources)
        self._before: _Counts | None = None

    def throw(self, on: bool) -> None:
        if self.sources.queue is not None:
            self.sources.queue.count = on

    def reset(self) -> None:
        self._before = None

    def sample(self, now_ns: int) -> dict[str, float]:
        values: dict[str, float] = {}
        prefetcher, queue = self.sources.prefetcher, self.sources.queue
        if prefetcher is not None and prefetcher.capacity:
            values["pipeline/prefetch_fill_ratio"] = prefetcher.depth_now() / prefetcher.capacity
        if queue is None:
            return values
        depth = queue.depth()
        values["pipeline/hs_queue_depth"] = depth
        values["pipeline/hs_queue_fill_ratio"] = depth / queue.capacity
        values["pipeline/hs_ready_deficit"] = queue.ready_deficit()
        depths = [count for count in queue.bucket_depths().values() if count > 0]
        values["pipeline/hs_bucket_nonempty_count"] = len(depths)
        if depths:
            values["pipeline/hs_bucket_entropy"] = entropy_bits(depths)
        oldest_ns = queue.oldest_ns()
        if oldest_ns is not None:
            values["pipeline/hs_oldest_age_s"] = max(0, now_ns - oldest_ns) / 1e9
        values.update(self._deltas(_read(queue.counters, now_ns)))
        return values

    def instruments(self) -> tuple[int, float]:
        if self.sources.queue is None:
            return 0, 0.0
        counters = self.sources.queue.counters
        # Charged as if every put and every get had waited.
        calls = counters.put_count + counters.get_count
        return calls, cost_ns(_Probe().wait) if calls else 0.0

    def _deltas(self, now: _Counts) -> dict[str, float]:
        before, self._before = self._before, now
        if before is None:
            return {}
        puts, gets = now.puts - before.puts, now.gets - before.gets
        values = {
            "pipeline/put_batches": float(puts),
            "pipeline/get_batches": float(gets),
            "pipeline/consumer_wait_s": max(0, now.consumer_wait_ns - before.consumer_wait_ns) / 1e9,
            "pipeline/producer_wait_s": max(0, now.producer_wait_ns - before.producer_wait_ns) / 1e9,
        }
        if gets > 0:
            values["pipeline/target_to_drafter_batch_ratio"] = puts / gets
        return values


def _read(counters: Any, now_ns: int) -> _Counts:
    """The counters with the waits in progress added, so that a worker that is stuck shows while it is stuck.

    The start of a wait is read before the finished waits: a wait that ends in between is then counted once
    too often for one sample, and never missed; the next sample puts it right."""
    consumer = _in_progress(counters.consumer_since_ns, now_ns)
    producer = _in_progress(counters.producer_since_ns, now_ns)
    return _Counts(
        counters.put_count,
        counters.get_count,
        counters.consumer_wait_ns + consumer,
        counters.producer_wait_ns + producer,
    )


def _in_progress(since_ns: Mapping[int, int], now_ns: int) -> int:
    return sum(max(0, now_ns - since) for since in tuple(since_ns.values()) if since)


class _Probe:
    """What the queue does for this collector when a worker waits."""

    def __init__(self) -> None:
        self.wait_ns = 0
        self.since_ns: dict[int, int] = {}

    def wait(self) -> None:
        since = perf_counter_ns()
        self.since_ns[0] = since
        self.since_ns[0] = 0
        self.wait_ns += perf_counter_ns() - since


def entropy_bits(counts: list[int]) -> float:
    """Shannon entropy of the shares of `counts`, all positive: 0 for one bucket, log2(n) for n equal ones."""
    total = sum(counts)
    return abs(-sum(count / total * math.log2(count / total) for count in counts))
