"""The one list of collectors, and what every key means. `python -m dflash.observe.registry` prints docs/metrics.md."""

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

METRICS: tuple[Metric, ...] = (*(metric for collector in COLLECTORS for metric in collector.metrics), *MONITOR_METRICS)
