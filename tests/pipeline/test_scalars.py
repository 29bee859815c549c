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
from dflash.pipeline.scalars_log import ScalarsLog
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


class TestJoin:
    """Two drafters, blocks of three: `loss_sum, weight_sum, blocks, accepted, ...`, then the norm."""

    @staticmethod
    def row(step: int, loss: float, weight: float = 1.0) -> tuple[int, np.ndarray, tuple[int, ...]]:
        values = [loss * weight, weight, 1.0, 1.0, *(0.0,) * 4, 1.0]
        return step, np.array(values, dtype=np.float32), (step,)

    def log(self, first: list[int], second: list[int]) -> ScalarsLog:
        log = ScalarsLog(2, block_size=3)
        log.arrived(0, [self.row(step, step) for step in first])
        log.arrived(1, [self.row(step, step + 10.0) for step in second])
        return log

    def test_rows_meet_by_step_and_not_by_place(self) -> None:
        rows = self.log([0, 1, 3], [0, 2, 3]).take()
        found = [(row.step, row.loss, row.missing) for row in rows]
        assert found == [(0, 5.0, 0), (1, 1.0, 1), (2, 12.0, 1), (3, 8.0, 0)]
        assert rows[1].metrics(0.1)["train/drafters_missing"] == 1.0
        assert "train/drafters_missing" not in rows[0].metrics(0.1)

    def test_a_step_waits_for_every_drafter_that_may_still_report_it(self) -> None:
        log = self.log([0, 1, 2], [0])
        assert [row.step for row in log.take()] == [0]
        log.arrived(1, [self.row(2, 12.0)])
        assert [(row.step, row.missing) for row in log.take()] == [(1, 1), (2, 0)]

    def test_at_the_end_what_is_there_is_all(self) -> None:
        log = self.log([0, 1, 2], [0])
        assert [(row.step, row.missing) for row in log.take(final=True)] == [(0, 0), (1, 1), (2, 1)]

    def test_a_nan_beside_a_dropped_row_is_seen(self) -> None:
        log = self.log([0], [0, 2])
        log.arrived(0, [self.row(1, float("nan")), self.row(2, 2.0)])
        losses = [row.loss for row in log.take()]
        assert losses[0] == 5.0
        assert np.isnan(losses[1])
        assert losses[2] == 7.0


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
