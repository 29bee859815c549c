"""profile: how long the stages of the workers take."""

from __future__ import annotations

from typing import ClassVar

from dflash.observe.accounting import cost_ns
from dflash.observe.collectors.base import Collector, Sources
from dflash.observe.histogram import FIRST_BUCKET, HistogramReader, Window
from dflash.observe.metric import Metric
from dflash.observe.recorder import CudaStageTimer, StageTimer

STAGES = {
    "target.model_forward": ("forward of the target up to its last tapped layer", "events"),
    "target.pack_hidden": ("packing of the tapped hidden states into their buffer", "events"),
    "target.cpu_copy_enqueue": ("enqueueing the hand-over of a batch to the drafters; the copy itself runs on", "host"),
    "drafter.queue_get": ("from first wanting a batch to having it", "host"),
    "drafter.forward": ("forward of the drafter and loss, the gradient at its hidden states included", "events"),
    "drafter.backward": ("backward of the drafter", "events"),
    "drafter.optimizer_step": ("averaging of gradients, clipping, optimizer step", "events"),
}
SOURCES = {
    "events": "CUDA event pairs on the worker's stream, read when passed (CPU: host clock)",
    "host": "host clock (perf_counter_ns)",
}


def _metrics() -> tuple[Metric, ...]:
    found = []
    for stage, (what, clock) in STAGES.items():
        key, source = f"profile/{stage}", SOURCES[clock]
        weight = f"{key}_count"
        found += [
            Metric(f"{key}_ms", "ms", "instant", f"mean time of {what}", source, weight=weight),
            Metric(f"{key}_ms_max", "ms", "instant", f"longest {what}", source, reduce="max"),
            *(
                Metric(f"{key}_ms_p{p}", "ms", "instant", f"{p}% of times of {what} were at most this", source, "none")
                for p in (50, 95, 99)
            ),
            Metric(f"{key}_count", "spans", "delta", f"times of {what}", source),
        ]
    return tuple(found)


class ProfileCollector(Collector):
    """Merges the histograms of all workers of a role; quantiles of a flush window come from its merged buckets."""

    name = "profile"
    metrics: ClassVar[tuple[Metric, ...]] = _metrics()

    def __init__(self, sources: Sources) -> None:
        super().__init__(sources)
        self._readers: dict[int, tuple[StageTimer, HistogramReader]] = {}
        self._window: dict[str, Window] = {}

    def _timers(self) -> list[StageTimer]:
        return [timer for recorder in self.sources.recorders for timer in tuple(recorder.timers.values())]

    def throw(self, on: bool) -> None:
        for timer in self._timers():
            timer.switch(on)

    def reset(self) -> None:
        self._window.clear()
        for _, reader in self._readers.values():
            reader.read()

    def sample(self, now_ns: int) -> dict[str, float]:
        merged: dict[str, Window] = {}
        for timer in self._timers():
            known = self._readers.get(id(timer))
            if known is None:
                known = self._readers[id(timer)] = (timer, HistogramReader(timer))
                timer.switch(self.on)
            window = known[1].read()
            if window.counts:
                merged.setdefault(timer.name, Window()).add(window)
        for stage, window in merged.items():
            self._window.setdefault(stage, Window()).add(window)
        return _values(merged)

    def flush(self) -> dict[str, float]:
        values = _values(self._window)
        self._window.clear()
        return values

    def instruments(self) -> tuple[int, float]:
        timers = self._timers()
        host = sum(sum(timer.cells[FIRST_BUCKET:]) for timer in timers if not isinstance(timer, CudaStageTimer))
        gpu = sum(sum(timer.cells[FIRST_BUCKET:]) for timer in timers if isinstance(timer, CudaStageTimer))
        if not host + gpu:
            return 0, 0.0
        probe = StageTimer("probe")
        probe.switch(True)

        def span() -> None:
            probe.start()
            probe.stop()

        total = host * cost_ns(span) if host else 0.0
        return host + gpu, (total + gpu * max(one.gpu_span_ns for one in self.sources.recorders)) / (host + gpu)


def _values(windows: dict[str, Window]) -> dict[str, float]:
    values: dict[str, float] = {}
    for stage, window in windows.items():
        statistics = window.statistics_ms()
        count, mean = statistics.pop("count", None), statistics.pop("mean", None)
        if count is None or mean is None:
            continue
        key = f"profile/{stage}"
        values[f"{key}_count"] = count
        values[f"{key}_ms"] = mean
        values.update((f"{key}_ms_{name}", value) for name, value in statistics.items())
    return values
