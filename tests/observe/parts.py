"""Stand-ins for the outside world: a GPU whose work finishes when the test says so, a queue, a sink that
keeps its rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from dflash.config import ObserveConfig
from dflash.data.prefetch import BatchCounters
from dflash.observe.collectors.base import Sources
from dflash.observe.recorder import WorkerRecorder
from dflash.observe.roles import RoleMap
from dflash.observe.sinks.base import Row, RowKind, Sink


class FakeGpu:
    """Counts what is enqueued; work is complete up to `done`. Every operation takes a millisecond of its
    time."""

    def __init__(self) -> None:
        self.enqueued = 0
        self.done = 0
        self.queries = 0
        self.created = 0
        self.lost = False

    def finish(self, operations: int | None = None) -> None:
        """The GPU works: some operations, or all."""
        self.done = self.enqueued if operations is None else min(self.enqueued, self.done + operations)


class FakeEvent:
    """As torch's: `query` is true before the first record; `elapsed_time` never waits and raises when
    incomplete."""

    def __init__(self, gpu: FakeGpu, timing: bool) -> None:
        self._gpu, self._timing = gpu, timing
        self.at: int | None = None
        self.streams: list[object] = []

    def record(self, stream: object = None) -> None:
        if self.at is None:
            self._gpu.created += 1
        self._gpu.enqueued += 1
        self.at = self._gpu.enqueued
        self.streams.append(stream)

    def query(self) -> bool:
        self._gpu.queries += 1
        if self._gpu.lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return self.at is None or self.at <= self._gpu.done

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self._timing
        assert end._timing
        if self.at is None or end.at is None or not (self.query() and end.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return float(end.at - self.at)

    def synchronize(self) -> None:
        raise AssertionError("nobody may wait for an event")


class FakeDevice:
    """A CUDA device with a fake GPU behind it."""

    def __init__(self, index: int = 0, gpu: FakeGpu | None = None) -> None:
        self.name = f"cuda:{index}"
        self.is_cuda = True
        self.torch = torch.device("cuda", index)
        self.gpu = gpu or FakeGpu()
        self.stream: Any = f"stream of {self.name}"

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        yield

    def event(self, timing: bool = False) -> FakeEvent:
        return FakeEvent(self.gpu, timing)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def synchronize(self) -> None:
        self.gpu.finish()


class ListSink(Sink):
    """Keeps its rows; may be told to fail."""

    name: ClassVar[str] = "list"
    kinds: frozenset[RowKind] = frozenset({"run", "metrics", "live", "train", "event", "summary"})

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.fail: Exception | None = None

    def write(self, rows: list[Row]) -> None:
        if self.fail is not None:
            raise self.fail
        self.rows.extend(rows)

    def of(self, kind: RowKind) -> list[Row]:
        return [row for row in self.rows if row.kind == kind]


@dataclass
class FakeCounters:
    put_count: int = 0
    get_count: int = 0
    consumer_wait_ns: int = 0
    producer_wait_ns: int = 0
    consumer_since_ns: dict[int, int] = field(default_factory=dict)
    producer_since_ns: dict[int, int] = field(default_factory=dict)


class FakeQueue:
    """What the pipeline collector reads of the shared queue."""

    def __init__(self, capacity: int = 24, hs_min_ready: int = 10) -> None:
        self.capacity, self.hs_min_ready = capacity, hs_min_ready
        self.counters = FakeCounters()
        self.count = False
        self.buckets: dict[int, int] = {}
        self.oldest: int | None = None

    def depth(self) -> int:
        return sum(self.buckets.values())

    def ready_deficit(self) -> int:
        return max(0, self.hs_min_ready - self.depth())

    def bucket_depths(self) -> dict[int, int]:
        return self.buckets

    def oldest_ns(self) -> int | None:
        return self.oldest


class FakePrefetcher:
    def __init__(self, capacity: int = 4, ready: int = 0, longest: int = 512) -> None:
        self.capacity, self.ready = capacity, ready
        self.counters = BatchCounters(longest)

    def depth_now(self) -> int:
        return self.ready


def sources(targets: Sequence[str] = ("cpu",), drafters: Sequence[str] = ("cpu",), **roles: Any) -> Sources:
    """Sources of a run without recorders."""
    return Sources(ObserveConfig(), RoleMap(tuple(targets), tuple(drafters), **roles))


def recorder_on(device: Any, role: Any = "target", index: int = 0, ring: int = 4) -> WorkerRecorder:
    """A recorder on a fake device."""
    return WorkerRecorder(role, index, device, ring)
