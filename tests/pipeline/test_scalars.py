"""Late scalars: never torn, never waited for, each with its own step, and a NaN named with its batches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash.data.batch import Batch, BatchSpec
from dflash.device import Device
from dflash.pipeline.scalars import LateScalars
from dflash.pipeline.supervisor import WorkerFailed
from tests.observe.parts import FakeDevice
from tests.pipeline.run import small_trainer


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_on_the_cpu_a_row_is_there_at_once() -> None:
    late = LateScalars(Device("cpu"), width=2, depth=4)
    late.push(7, vector(1.5, 2.5), tag=(3,))
    ((step, values, tag),) = late.poll()
    assert (step, tag) == (7, (3,))
    np.testing.assert_array_equal(values, np.array([1.5, 2.5], dtype=np.float32))
    assert late.poll() == []


def test_rows_come_when_their_event_has_fired_in_the_order_of_their_steps() -> None:
    device = FakeDevice()
    late = LateScalars(device, width=1, depth=4)
    for step in range(3):
        late.push(step, vector(step))
    assert late.poll() == []
    device.gpu.finish(1)
    assert [row.step for row in late.poll()] == [0]
    device.gpu.finish()
    assert [row.step for row in late.poll()] == [1, 2]


def test_polling_asks_about_one_row_only_while_the_gpu_is_behind() -> None:
    device = FakeDevice()
    late = LateScalars(device, width=1, depth=8)
    for step in range(5):
        late.push(step, vector(step))
    late.poll()
    assert device.gpu.queries == 1


def test_a_row_keeps_its_values_when_its_slot_is_used_again() -> None:
    late = LateScalars(Device("cpu"), width=1, depth=1)
    late.push(0, vector(10.0))
    (first,) = late.poll()
    late.push(1, vector(20.0))
    assert first.values[0] == 10.0


def test_a_full_ring_drops_the_new_row_and_counts_it_instead_of_tearing_an_old_one() -> None:
    device = FakeDevice()
    late = LateScalars(device, width=1, depth=2)
    for step in range(5):
        late.push(step, vector(step))
    assert late.dropped == 3
    device.gpu.finish()
    assert [(row.step, float(row.values[0])) for row in late.poll()] == [(0, 0.0), (1, 1.0)]
    late.push(9, vector(9.0))
    device.gpu.finish()
    assert [row.step for row in late.poll()] == [9]


def test_the_end_of_the_run_brings_what_is_still_under_way() -> None:
    device = FakeDevice()
    late = LateScalars(device, width=1, depth=4)
    late.push(0, vector(0.0))
    late.push(1, vector(1.0))
    assert [row.step for row in late.drain_blocking()] == [0, 1]
    assert late.pending == 0


@pytest.mark.slow
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_the_trainer_and_is_named_with_its_batch(
    tmp_path: Path, bad: float
) -> None:
    trainer = small_trainer(tmp_path, "train.steps=12", save_checkpoints=False)
    collate = trainer.prefetcher._collate

    def planted(spec: BatchSpec) -> Batch:
        batch = collate(spec)
        if spec.index == 5:
            batch.weights[batch.weights > 0] = bad
        return batch

    trainer.prefetcher._collate = planted
    with pytest.raises(WorkerFailed) as failed:
        trainer.run()
    trainer.observer.close()
    samples = list(trainer.sample_ids(5))
    assert (
        f"step 5: loss is {trainer.result.scalars[-1].loss}; batches [5], samples [{tuple(samples)}]"
        in failed.value.failure.text()
    )
    rows = [
        json.loads(line)
        for line in (trainer.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [0, 1, 2, 3, 4, 5]
    assert [row["values"]["train/loss"] for row in rows if row["kind"] == "train"][-1] in ("NaN", "Infinity")
    assert [row["values"]["failed_step"] for row in rows if row["kind"] == "event"] == [5]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_rows_arrive_without_a_wait() -> None:
    device = Device("cuda:0")
    with device.active():
        late = LateScalars(device, width=3, depth=64)
        values = torch.arange(3, device=device.torch, dtype=torch.float32)
        for step in range(32):
            late.push(step, values + step)
        rows = late.poll()
        rows += late.drain_blocking()
    assert [row.step for row in rows] == list(range(32))
    assert [float(row.values[0]) for row in rows] == [float(step) for step in range(32)]
