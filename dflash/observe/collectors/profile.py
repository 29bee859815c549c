"""profile: how long the stages of the workers take."""

from __future__ import annotations

from typing import ClassVar

from dflash.observe.accounting import cost_ns
from dflash.observe.collectors.base import Collector, Sources
from dflash.observe.histogram import SpanReader, Window
from dflash.observe.metric import Metric
from dflash.observe.recorder import CudaStageTimer, StageTimer, WorkerRecorder

_EVENTS = "CUDA event pairs on the worker's stream, read once passed; on the CPU the host clock"
_HOST = "host clock"
STAGES = {
    "target.model_forward": ("forward of the target up to its last tapped layer", _EVENTS),
    "target.pack_hidden": ("packing of the tapped hidden states into their buffer", _EVENTS),
    "target.cpu_copy_enqueue": (
        "enqueueing of the hand-over: the copy to pinned memory where a drafter's GPU cannot reach the "
        "target's, else its event alone, behind which the drafter copies or reads",
        _HOST,
    ),
    "drafter.queue_get": ("wait of a drafter from first wanting a batch to having it", _HOST),
    "drafter.forward": ("forward of the drafter and its loss", _EVENTS),
    "drafter.backward": ("backward of the drafter", _EVENTS),
    "drafter.optimizer_step": ("gradient clipping and optimizer step", _EVENTS),
}
_ANY = "profile/{stage}"


def _metrics() -> tuple[Metric, ...]:
    means = (
        Metric(
            f"profile/{stage}_ms", "ms", "instant", f"mean {what}", source, weight=f"profile/{stage}_count"
        )
        for stage, (what, source) in STAGES.items()
    )
    return (
        *means,
        Metric(f"{_ANY}_ms_max", "ms", "instant", "longest of the stage", "as the mean", reduce="max"),
        *(
            Metric(
                f"{_ANY}_ms_p{p}",
                "ms",
                "instant",
                f"{p}% took at most this",
                "as the mean; within 6%",
                reduce="none",
            )
            for p in (50, 95, 99)
        ),
        Metric(
            f"{_ANY}_count",
            "spans",
            "delta",
            "how many; the others are of the last 512 of a worker and tick",
            "as the mean",
        ),
    )


class ProfileCollector(Collector):
    """How long each stage of the workers takes, over all workers of a role.

    Counts the workers' spans in log-buckets; quantiles of a flush window come from its merged buckets.
    """

    name = "profile"
    every_tick = False
    metrics: ClassVar[tuple[Metric, ...]] = _metrics()

    def __init__(self, sources: Sources) -> None:
        super().__init__(sources)
        self._readers: dict[int, tuple[StageTimer, SpanReader]] = {}
        self._window: dict[str, Window] = {}
        self._since_sample: dict[str, Window] = {}

    def _timers(self) -> list[StageTimer]:
        return [timer for recorder in self.sources.recorders for timer in tuple(recorder.timers.values())]

    def equip(self, recorder: WorkerRecorder) -> None:
        if recorder.pool is not None:
            recorder.hang(self.name, recorder.pool)

    def throw(self, on: bool) -> None:
        for recorder in self.sources.recorders:
            recorder.switch_timers(on)

    def reset(self) -> None:
        self.gather()
        self._window.clear()
        self._since_sample.clear()

    def gather(self) -> dict[str, float]:
        """The rings are short: empty them at each tick."""
        for timer in self._timers():
            known = self._readers.get(id(timer))
            if known is None:
                known = self._readers[id(timer)] = (timer, SpanReader(timer))
            window = known[1].read()
            if window is not None:
                self._since_sample.setdefault(timer.name, Window()).add(window)
        return {}

    def stretch(self, share: float) -> dict[str, float]:
        for _, reader in self._readers.values():
            reader.stretch(share)
        return {}

    def sample(self, now_ns: int) -> dict[str, float]:
        self.gather()
        since, self._since_sample = self._since_sample, {}
        for stage, window in since.items():
            self._window.setdefault(stage, Window()).add(window)
        return _values(since)

    def flush(self) -> dict[str, float]:
        values = _values(self._window)
        self._window.clear()
        return values

    def instruments(self) -> tuple[int, float]:
        timers = self._timers()
        host = sum(timer.count for timer in timers if not isinstance(timer, CudaStageTimer))
        gpu = sum(timer.count for timer in timers if isinstance(timer, CudaStageTimer))
        if not host + gpu:
            return 0, 0.0
        probe = StageTimer("probe")
        probe.switch(True)

        def span() -> None:
            probe.start()
            probe.stop()

        total = host * cost_ns(span) if host else 0.0
        pools = [recorder.pool for recorder in self.sources.recorders if recorder.pool is not None]
        total += gpu * max((pool.span_ns for pool in pools), default=0.0)
        return host + gpu, total / (host + gpu)


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
