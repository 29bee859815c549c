"""The registry is the one place that says what a key means; the page and the code agree with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import dflash
from dflash.commands.metrics_page import render
from dflash.device import Device
from dflash.observe.metric import Metric, MetricIndex
from dflash.observe.recorder import WorkerRecorder
from dflash.observe.registry import all_metrics, families
from tests.observe.parts import sources

DESIGN_KEYS = """
profile/target.model_forward_ms profile/target.pack_hidden_ms profile/target.cpu_copy_enqueue_ms profile/drafter.queue_get_ms
profile/drafter.forward_ms profile/drafter.backward_ms profile/drafter.optimizer_step_ms profile/drafter.forward_ms_p99
profile/drafter.forward_ms_max profile/drafter.forward_count gpu/0/util_pct gpu/7/mem_used_gb gpu/0/power_w gpu/0/temp_c
gpu/0/throttle_power gpu/target_mean/util_pct gpu/drafter_mean/power_w pipeline/hs_queue_depth pipeline/hs_queue_fill_ratio
pipeline/hs_ready_deficit pipeline/hs_bucket_nonempty_count pipeline/hs_bucket_entropy pipeline/hs_oldest_age_s
pipeline/consumer_wait_s pipeline/producer_wait_s pipeline/target_to_drafter_batch_ratio pipeline/prefetch_fill_ratio
target/4/batches target/4/tokens target/4/step target/4/busy_s target/4/wait_in_s target/4/wait_out_s
target/4/tokens_per_second target/4/capacity_tokens_per_second target/skew drafter/2/batches drafter/2/step drafter/skew
batch/tokens batch/loss_token_fraction batch/padding_efficiency batch/size batch/length_p50 batch/length_p95
cuda/0/allocated_gb cuda/0/reserved_gb cuda/0/max_reserved_gb cuda/0/inactive_split_gb cuda/0/alloc_retries cuda/0/device_allocs
train/loss train/accept_length train/slot_15_accuracy train/grad_norm train/lr
monitor/tick_ms monitor/lateness_ms monitor/dropped
"""


@pytest.mark.parametrize("key", DESIGN_KEYS.split())
def test_every_key_of_the_design_has_a_meaning(key: str) -> None:
    assert MetricIndex(all_metrics()).find(key) is not None


def test_a_key_that_nobody_declared_has_none() -> None:
    assert MetricIndex(all_metrics()).find("gpu/0/moon_phase") is None
    assert MetricIndex(all_metrics()).find("target/0/x/step") is None


def test_the_page_is_the_registrys() -> None:
    page = Path(dflash.__file__).parents[1] / "docs" / "metrics.md"
    assert page.read_text(encoding="utf-8") == render(), (
        "python -m dflash.commands.metrics_page > docs/metrics.md"
    )


def test_the_pages_example_of_a_collector_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", render(), flags=re.DOTALL)
    scope: dict[str, Any] = {}
    exec(code, scope)
    made = sources()
    worker = WorkerRecorder("drafter", 1, Device("cpu"))
    made.recorders.append(worker)
    strides = scope["Strides"](made)
    strides.switch(True)
    assert strides.begin(0) == {}
    worker.step = 7
    found = strides.sample(1)
    assert found == {"strides/drafter-1_steps": 7}
    assert all(MetricIndex(strides.metrics).find(key) is not None for key in found)


def test_keys_are_unique() -> None:
    keys = [metric.key for metric in all_metrics()]
    assert len(set(keys)) == len(keys)


def test_families() -> None:
    known = {"profile", "gpu", "pipeline", "target", "drafter", "batch", "cuda", "train", "monitor"}
    assert set(families(all_metrics())) >= known


@pytest.mark.parametrize("metric", all_metrics(), ids=lambda metric: metric.key)
def test_weights_are_declared_deltas(metric: Metric) -> None:
    if metric.weight is not None:
        filled = metric.weight.format(i=0, k=1, stage="drafter.forward")
        weight = MetricIndex(all_metrics()).find(filled)
        assert weight is not None
        assert weight.kind == "delta"


def test_a_placeholder_of_the_weight_is_filled_from_the_key() -> None:
    metric = MetricIndex(all_metrics()).find("target/3/capacity_tokens_per_second")
    assert metric is not None
    assert metric.weight_of("target/3/capacity_tokens_per_second") == "target/3/busy_s"
