"""cuda: the caching allocator of every device. The workers take the snapshots; the monitor makes no CUDA call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from dflash.observe.collectors.base import Collector, Sources
from dflash.observe.metric import Metric
from dflash.observe.recorder import WorkerRecorder

_STATS = "memory_stats_as_nested_dict, taken by a worker of the device at its step boundary, at most once per tick"
_LEVELS = {
    "allocated_gb": ("allocated_bytes", "current", "memory in tensors"),
    "reserved_gb": ("reserved_bytes", "current", "memory that the allocator holds"),
    "max_reserved_gb": ("reserved_bytes", "peak", "most that it has held"),
    "inactive_split_gb": ("inactive_split_bytes", "current", "free parts of blocks in use: fragmentation"),
}
_COUNTS = {
    "alloc_retries": ("num_alloc_retries", "times it emptied its cache to try again; each one waits for the device"),
    "device_allocs": ("num_device_alloc", "cudaMalloc or cuMemMap calls; none in a steady state"),
}


class CudaCollector(Collector):
    """The caching allocator of every CUDA device in use; `{i}` is CUDA's index.

    Asks one worker of each device for a snapshot, and reads at the next tick what it left.
    """

    name = "cuda"
    metrics: ClassVar[tuple[Metric, ...]] = (
        *(Metric(f"cuda/{{i}}/{key}", "GB", "instant", meaning, _STATS) for key, (_, _, meaning) in _LEVELS.items()),
        *(Metric(f"cuda/{{i}}/{key}", "calls", "delta", meaning, _STATS) for key, (_, meaning) in _COUNTS.items()),
    )

    def __init__(self, sources: Sources) -> None:
        super().__init__(sources)
        self._before: dict[int, dict[str, int]] = {}
        self._asked: dict[int, int] = {}

    def throw(self, on: bool) -> None:
        if not on:
            for recorder in self.sources.recorders:
                recorder.want_memory = False

    def reset(self) -> None:
        self._before.clear()
        for recorder in self.sources.recorders:
            recorder.memory = None

    def sample(self, now_ns: int) -> dict[str, float]:
        values: dict[str, float] = {}
        for index, recorders in sorted(self._devices().items()):
            turn = self._asked.get(index, 0)
            recorder = recorders[turn % len(recorders)]
            snapshot = recorder.memory
            if snapshot is not None:
                recorder.memory = None
                values.update(self._values(index, snapshot))
            elif recorder.want_memory:
                # It has made no step since it was asked: ask the next worker of this device.
                recorder.want_memory = False
                self._asked[index] = turn + 1
                recorder = recorders[(turn + 1) % len(recorders)]
            recorder.want_memory = True
        return values

    def instruments(self) -> tuple[int, float]:
        calls = sum(recorder.memory_calls for recorder in self.sources.recorders)
        taken_ns = sum(recorder.memory_ns for recorder in self.sources.recorders)
        return calls, taken_ns / calls if calls else 0.0

    def _devices(self) -> dict[int, list[WorkerRecorder]]:
        devices: dict[int, list[WorkerRecorder]] = {}
        for recorder in self.sources.recorders:
            if recorder.device.is_cuda and recorder.role != "prefetcher":
                devices.setdefault(recorder.device.torch.index, []).append(recorder)
        return devices

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
