"""Starve the real trainer three ways: the dashboard's own numbers name the culprit each time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash.observe.bottleneck import find_bottleneck
from dflash.observe.registry import COLLECTORS
from dflash.pipeline.trainer import Trainer
from tests.pipeline.run import small_trainer

PAUSE_S = 0.05
STEPS = 40


def slowed(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, with a pause before it."""

    def slow(*arguments: Any, **named: Any) -> Any:
        time.sleep(PAUSE_S)
        return call(*arguments, **named)

    return slow


def slow_target(trainer: Trainer) -> None:
    for worker in trainer.target_workers:
        worker._run_target = slowed(worker._run_target)  # type: ignore[method-assign]


def slow_drafter(trainer: Trainer) -> None:
    for worker in trainer.drafter_workers:
        worker._micro_step = slowed(worker._micro_step)  # type: ignore[method-assign]


def slow_prefetcher(trainer: Trainer) -> None:
    trainer.prefetcher._collate = slowed(trainer.prefetcher._collate)


def rows_of(trainer: Trainer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (trainer.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def observed(folder: Path, starve: Callable[[Trainer], None]) -> tuple[dict[str, float], str]:
    """Values and verdict of a whole run."""
    settings = (f"train.steps={STEPS}", "observe.tick_s=0.1", "observe.flush_s=0.5")
    trainer = small_trainer(folder, *settings, save_checkpoints=False)
    starve(trainer)
    trainer.run()
    summary = trainer.observer.close()
    assert summary.failed == {}
    assert rows_of(trainer)[-1]["values"]["bottleneck"] == summary.bottleneck
    return summary.values, summary.bottleneck


def test_the_real_trainer_fills_every_key_that_needs_no_gpu(tmp_path: Path) -> None:
    """A key in the registry that no code writes would stay an empty panel for ever."""
    two = ("target.devices=['cpu','cpu']", "drafter.devices=['cpu','cpu']")
    settings = ("train.steps=12", "observe.tick_s=0.1", "observe.flush_s=0.3", *two)
    trainer = small_trainer(tmp_path, *settings, save_checkpoints=False)
    slow_drafter(trainer)  # so that the queue holds something whenever it is looked at
    trainer.run()
    trainer.observer.close()
    written = {key for row in rows_of(trainer) if row["kind"] == "metrics" for key in row["values"]}
    metrics = [metric for collector in COLLECTORS for metric in collector.metrics]
    empty = [metric.key for metric in metrics if not any(metric.pattern.fullmatch(key) for key in written)]
    assert [key for key in empty if not key.startswith(("gpu/", "cuda/"))] == []


def test_a_slow_target(tmp_path: Path) -> None:
    values, verdict = observed(tmp_path, slow_target)
    assert verdict.startswith("bottleneck: target side, drafters idle")
    assert values["pipeline/consumer_wait_s"] > 0.5 * STEPS * PAUSE_S
    assert values["pipeline/producer_wait_s"] < 0.1 * STEPS * PAUSE_S
    assert values["pipeline/prefetch_fill_ratio"] > 0.5
    assert values["pipeline/hs_queue_fill_ratio"] < 0.5
    assert values["target/0/capacity_tokens_per_second"] < 0.7 * values["drafter/0/capacity_tokens_per_second"]


def test_a_slow_drafter(tmp_path: Path) -> None:
    values, verdict = observed(tmp_path, slow_drafter)
    assert verdict.startswith("bottleneck: drafter side, targets idle")
    assert values["pipeline/producer_wait_s"] > 0.4 * STEPS * PAUSE_S
    assert values["pipeline/consumer_wait_s"] < 0.2 * STEPS * PAUSE_S
    assert values["pipeline/hs_queue_fill_ratio"] > 0.5
    assert values["drafter/0/capacity_tokens_per_second"] < 0.7 * values["target/0/capacity_tokens_per_second"]


def test_a_slow_prefetcher(tmp_path: Path) -> None:
    values, verdict = observed(tmp_path, slow_prefetcher)
    assert verdict.startswith("bottleneck: data side (prefetcher)")
    assert values["pipeline/prefetch_fill_ratio"] < 0.2
    assert values["target/0/wait_in_s"] > 0.4 * STEPS * PAUSE_S
    assert values["pipeline/consumer_wait_s"] > 0.4 * STEPS * PAUSE_S


def test_a_worker_that_hangs_is_seen_while_it_hangs(tmp_path: Path) -> None:
    """The drafter waits for a target that does not come back: each tick shows the wait growing."""
    trainer = small_trainer(tmp_path, "train.steps=6", "observe.tick_s=0.1", "observe.flush_s=0.2", save_checkpoints=False)
    (worker,) = trainer.target_workers
    run_target = worker._run_target
    hung = []

    def hang_once(*arguments: Any) -> Any:
        if worker._recorder.batches == 3 and not hung:
            hung.append(True)
            time.sleep(1.0)
        return run_target(*arguments)

    worker._run_target = hang_once  # type: ignore[method-assign]
    trainer.run()
    trainer.observer.close()
    windows = [row["values"] for row in rows_of(trainer) if row["kind"] == "metrics"]
    waits = [row["drafter/0/wait_in_s"] for row in windows]
    assert sum(wait > 0.15 for wait in waits) >= 3
    assert sum(waits) == pytest.approx(1.0, abs=0.4)
    longest = max(windows, key=lambda row: row["drafter/0/wait_in_s"])
    assert find_bottleneck(longest, 0.2).drafters_idle == pytest.approx(1.0, abs=0.35)


def test_a_target_that_cannot_hand_over_is_seen_while_it_waits(tmp_path: Path) -> None:
    """The drafter hangs and the queue fills up: the target's wait grows at each tick, not in one lump at its end."""
    settings = ("train.steps=14", "observe.tick_s=0.1", "observe.flush_s=0.2", "queue.capacity=1", "queue.hs_min_ready=1")
    trainer = small_trainer(tmp_path, *settings, save_checkpoints=False)
    (worker,) = trainer.drafter_workers
    micro_step = worker._micro_step

    def hang_once(*arguments: Any) -> Any:
        if worker.step_index == 3:
            time.sleep(1.0)
        return micro_step(*arguments)

    worker._micro_step = hang_once  # type: ignore[method-assign]
    trainer.run()
    trainer.observer.close()
    waits = [row["values"]["target/0/wait_out_s"] for row in rows_of(trainer) if row["kind"] == "metrics"]
    assert sum(wait > 0.12 for wait in waits) >= 3
    assert sum(waits) == pytest.approx(1.0, abs=0.4)
