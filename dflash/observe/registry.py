"""The one list of collectors, and what every key means; `metrics_page` makes docs/metrics.md of it."""

from __future__ import annotations

from dflash.observe.collectors.base import Collector
from dflash.observe.collectors.batch import BatchCollector
from dflash.observe.collectors.cuda import CudaCollector
from dflash.observe.collectors.gpu import GpuCollector
from dflash.observe.collectors.pipeline import PipelineCollector
from dflash.observe.collectors.profile import ProfileCollector
from dflash.observe.collectors.workers import WorkersCollector
from dflash.observe.metric import Metric
from dflash.observe.monitor import METRICS as MONITOR_METRICS

COLLECTORS: tuple[type[Collector], ...] = (
    ProfileCollector,
    GpuCollector,
    PipelineCollector,
    WorkersCollector,
    BatchCollector,
    CudaCollector,
)

_RING = "the drafters' stacked scalars, copied to a pinned ring and read when the event has fired; tagged with their step"
TRAIN_METRICS = (
    Metric("train/loss", "nats", "instant", "weighted cross-entropy over the supervised slots of the step", _RING),
    Metric("train/accept_length", "tokens", "instant", "mean of the leading slots guessed right, plus one: a proxy of τ", _RING),
    Metric("train/slot_{k}_accuracy", "1", "ratio", "share of slot k guessed right; absent where none was supervised", _RING),
    Metric("train/grad_norm", "1", "instant", "norm of the gradient before clipping", _RING),
    Metric("train/lr", "1", "instant", "learning rate of the step", "the schedule, on the host"),
)

METRICS: tuple[Metric, ...] = (
    *(metric for collector in COLLECTORS for metric in collector.metrics),
    *TRAIN_METRICS,
    *MONITOR_METRICS,
)

FAMILIES = tuple(dict.fromkeys(metric.key.partition("/")[0] for metric in METRICS))
