"""Late scalars: never torn, never waited for, each with its own step, and a NaN named with its batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash.device import Device
from dflash.observe.scalars import LateScalars, NonFiniteError, check_finite
from dflash.types import BatchSpec
from tests.observe.parts import FakeDevice


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


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_is_not_finite_is_named_with_its_step_and_batches(bad: float) -> None:
    late = LateScalars(Device("cpu"), width=2, depth=4)
    late.push(41, vector(1.0, 2.0), tag=(82, 83))
    late.push(42, vector(bad, 2.0), tag=(BatchSpec(index=84, anchor_seed=0, sample_ids=(5, 9), bucket=128),))
    with pytest.raises(NonFiniteError, match=r"train/loss is -?(nan|inf) at step 42, from batches 84 \(samples 5, 9\)"):
        check_finite(late.poll(), ("train/loss", "train/grad_norm"))


def test_other_columns_may_be_anything() -> None:
    late = LateScalars(Device("cpu"), width=2, depth=4)
    late.push(0, vector(1.0, float("nan")))
    check_finite(late.poll(), ("train/loss", "train/slot_1_accuracy"))


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
