"""The collectors and the sinks, and what every key means; `metrics_page` makes docs/metrics.md of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dflash.config import ObserveConfig
from dflash.observe.collectors.base import Collector
from dflash.observe.collectors.batch import BatchCollector
from dflash.observe.collectors.cuda import CudaCollector
from dflash.observe.collectors.gpu import GpuCollector
from dflash.observe.collectors.pipeline import PipelineCollector
from dflash.observe.collectors.profile import ProfileCollector
from dflash.observe.collectors.workers import WorkersCollector
from dflash.observe.metric import Metric
from dflash.observe.monitor import METRICS as MONITOR_METRICS
from dflash.observe.sinks.base import Sink
from dflash.observe.sinks.jsonl import JsonlSink
from dflash.observe.sinks.tensorboard import TensorboardSink
from dflash.observe.sinks.terminal import TerminalSink
from dflash.observe.sinks.wandb import WandbSink
from steptime.errors import UserError
from steptime.registry import Registry

COLLECTORS: Registry[type[Collector]] = Registry(
    "collector",
    ProfileCollector,
    GpuCollector,
    PipelineCollector,
    WorkersCollector,
    BatchCollector,
    CudaCollector,
)

_RING = (
    "the drafters' stacked scalars, copied to a pinned ring and read when the event has fired; tagged with "
    "their step"
)
TRAIN_METRICS = (
    Metric(
        "train/loss", "nats", "instant", "weighted cross-entropy over the supervised slots of the step", _RING
    ),
    Metric(
        "train/accept_length",
        "tokens",
        "instant",
        "mean of the leading slots guessed right, plus one: a proxy of τ",
        _RING,
    ),
    Metric(
        "train/slot_{k}_accuracy",
        "1",
        "ratio",
        "share of slot k guessed right; absent where none was supervised",
        _RING,
    ),
    Metric("train/grad_norm", "1", "instant", "norm of the gradient before clipping", _RING),
    Metric("train/lr", "1", "instant", "learning rate of the step", "the schedule, on the host"),
    Metric(
        "train/drafters_missing",
        "drafters",
        "instant",
        "drafters whose scalars of the step were dropped, so that the other figures are of the rest; absent "
        "when none were",
        "rows that found the pinned ring full (`observe.ring`), joined by their step",
    ),
)

_HELDOUT = "the drafter on `data.heldout`, between two steps; read when the event has fired"
HELDOUT_METRICS = (
    Metric(
        "train/tau",
        "tokens",
        "instant",
        "acceptance length τ in greedy decoding: committed tokens per verification on the first "
        "`train.tau_prompts` prompts of `data.heldout`, as `dflash eval` counts them",
        "target and drafter decode between two steps, while training stands still",
    ),
    Metric("heldout/loss", "nats", "instant", "as train/loss, on samples that are not trained on", _HELDOUT),
    Metric("heldout/accept_length", "tokens", "instant", "as train/accept_length, on the same", _HELDOUT),
    Metric("heldout/slot_{k}_accuracy", "1", "ratio", "as train/slot_{k}_accuracy, on the same", _HELDOUT),
)

SINKS: Registry[type[Sink]] = Registry("sink", JsonlSink, TerminalSink, TensorboardSink, WandbSink)


def chosen_sinks(config: ObserveConfig) -> tuple[type[Sink], ...]:
    """The sinks that the settings turn on.

    Raises:
        UserError: `observe.sinks` names one that there is not, or one that has a key of its own.
    """
    for name in config.sinks:
        if SINKS[name].switch:
            raise UserError(f"observe.sinks: {name!r} has a key of its own, observe.{SINKS[name].switch}")
    return tuple(sink for sink in SINKS if sink.wanted(config))


def without_sinks(config: ObserveConfig) -> ObserveConfig:
    """The same with every sink off that can be: metrics.jsonl alone is written."""
    off: dict[str, Any] = {sink.switch: sink.off for sink in SINKS if sink.switch}
    return config.model_copy(update=off | {"sinks": ()})


def all_metrics() -> tuple[Metric, ...]:
    """Every key that a run can report."""
    return (
        *(metric for collector in COLLECTORS for metric in collector.metrics),
        *TRAIN_METRICS,
        *HELDOUT_METRICS,
        *MONITOR_METRICS,
    )


def families(metrics: Iterable[Metric]) -> tuple[str, ...]:
    """First parts of the keys."""
    return tuple(dict.fromkeys(metric.key.partition("/")[0] for metric in metrics))
