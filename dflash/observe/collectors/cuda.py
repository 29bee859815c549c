"""cuda: the caching allocator of every device. The workers take the snapshots; the monitor makes no CUDA
call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from time import perf_counter_ns
from typing import Any, ClassVar

import torch

from dflash.observe.collectors.base import Collector, Sources
from dflash.observe.metric import Metric
from dflash.observe.recorder import Instrument, WorkerRecorder

_STATS = (
    "memory_stats_as_nested_dict, taken by a worker of the device at its step boundary, at most once per tick"
)
_LEVELS = {
    "allocated_gb": ("allocated_bytes", "current", "memory in tensors"),
    "reserved_gb": ("reserved_bytes", "current", "memory that the allocator holds"),
    "max_reserved_gb": ("reserved_bytes", "peak", "most that it has held"),
    "inactive_split_gb": ("inactive_split_bytes", "current", "free parts of blocks in use: fragmentation"),
}
_COUNTS = {
    "alloc_retries": (
        "num_alloc_retries",
        "times it emptied its cache to try again; each one waits for the device",
    ),
    "device_allocs": ("num_device_alloc", "cudaMalloc or cuMemMap calls; none in a steady state"),
}


class Snapshots(Instrument):
    """One worker's view of the allocator: switched on for each snapshot, taken at the next step boundary.

    Attributes:
        device: CUDA's index.
        latest: the last snapshot, one immutable object swapped in, or None.
        calls, taken_ns: snapshots taken, and the time they took.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.device = device, device.index
        self.latest: dict[str, Any] | None = None
        self.calls = self.taken_ns = 0

    def run(self) -> None:
        self.on = False
        started_ns = perf_counter_ns()
        # Copies a struct under the allocator's lock: no CUDA call and no sync.
        self.latest = torch.cuda.memory.memory_stats_as_nested_dict(self._device)
        self.taken_ns += perf_counter_ns() - started_ns
        self.calls += 1


class CudaCollector(Collector):
    """The caching allocator of every CUDA device in use; `{i}` is CUDA's index.

    Asks one worker of each device for a snapshot, and reads at the next tick what it left.
    """

    name = "cuda"
    metrics: ClassVar[tuple[Metric, ...]] = (
        *(
            Metric(f"cuda/{{i}}/{key}", "GB", "instant", meaning, _STATS)
            for key, (_, _, meaning) in _LEVELS.items()
        ),
        *(
            Metric(f"cuda/{{i}}/{key}", "calls", "delta", meaning, _STATS)
            for key, (_, meaning) in _COUNTS.items()
        ),
    )

    def __init__(self, sources: Sources) -> None:
        super().__init__(sources)
        self._devices: dict[int, list[Snapshots]] = {}
        self._before: dict[int, dict[str, int]] = {}
        self._asked: dict[int, int] = {}

    @classmethod
    def unavailable(cls) -> str:
        return "" if torch.cuda.is_available() else "no GPU"

    def equip(self, recorder: WorkerRecorder) -> None:
        if recorder.device.is_cuda and recorder.role != "prefetcher":
            snapshots = Snapshots(recorder.device.torch)
            self._devices.setdefault(snapshots.device, []).append(snapshots)
            recorder.hang(self.name, snapshots)

    def throw(self, on: bool) -> None:
        if not on:
            for snapshots in self._all():
                snapshots.on = False

    def reset(self) -> None:
        self._before.clear()
        for snapshots in self._all():
            snapshots.latest = None

    def sample(self, now_ns: int) -> dict[str, float]:
        values: dict[str, float] = {}
        for index, workers in sorted(self._devices.items()):
            turn = self._asked.get(index, 0)
            worker = workers[turn % len(workers)]
            latest = worker.latest
            if latest is not None:
                worker.latest = None
                values.update(self._values(index, latest))
            elif worker.on:
                # It has made no step since it was asked: ask the next worker of this device.
                worker.on = False
                self._asked[index] = turn + 1
                worker = workers[(turn + 1) % len(workers)]
            worker.on = True
        return values

    def instruments(self) -> tuple[int, float]:
        calls = sum(snapshots.calls for snapshots in self._all())
        return calls, sum(snapshots.taken_ns for snapshots in self._all()) / calls if calls else 0.0

    def _all(self) -> list[Snapshots]:
        return [snapshots for workers in self._devices.values() for snapshots in workers]

    def _values(self, index: int, snapshot: Mapping[str, Any]) -> dict[str, float]:
        values = {f"cuda/{index}/{key}": value for key, value in _levels(snapshot)}
        now = {key: int(snapshot[name]) for key, (name, _) in _COUNTS.items() if name in snapshot}
        before = self._before.get(index, {})
        self._before[index] = now
        values.update((f"cuda/{index}/{key}", float(now[key] - before[key])) for key in now if key in before)
        return values


def _levels(snapshot: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """What is there of the levels, in GB (1e9 bytes)."""
    for key, (name, part, _) in _LEVELS.items():
        value = snapshot.get(name, {}).get("all", {}).get(part)
        if value is not None:
            yield key, value / 1e9
