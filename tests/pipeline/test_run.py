"""The whole run: learns, repeats bit for bit, resumes exactly, several drafters equal one."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from dflash.pipeline import checkpoint
from dflash.pipeline.progress import Progress
from dflash.pipeline.supervisor import WorkerFailed
from tests.pipeline.run import Hooks, losses, settled_trainer, small_trainer
from tests.waiting import HANG_S

pytestmark = pytest.mark.timeout(2 * HANG_S)


@pytest.mark.slow
def test_it_learns(tmp_path):
    curve = losses(small_trainer(tmp_path, "train.steps=150"))
    assert len(curve) == 150
    assert sum(curve[-5:]) < 0.6 * sum(curve[:5])


@pytest.mark.slow
def test_one_seed_one_curve_to_the_last_bit(tmp_path):
    first = losses(small_trainer(tmp_path, name="a"))
    second = losses(small_trainer(tmp_path, name="b"))
    assert first == second
    assert first != losses(small_trainer(tmp_path, "data.seed=1", name="c"))


@pytest.mark.slow
def test_one_curve_whatever_the_number_of_targets(tmp_path):
    one = losses(small_trainer(tmp_path, name="one"))
    three = losses(small_trainer(tmp_path, 'target.devices=["cpu:0", "cpu:1", "cpu:2"]', name="three"))
    assert one == three


@pytest.mark.slow
def test_n_drafters_equal_one_that_accumulates_n(tmp_path):
    accumulating = small_trainer(tmp_path, "train.accumulation=3", name="one")
    several = small_trainer(tmp_path, 'drafter.devices=["cpu:0", "cpu:1", "cpu:2"]', name="three")
    assert losses(accumulating) == pytest.approx(losses(several), rel=1e-5)
    one, three = accumulating.replicas[0].flat.master, several.replicas[0].flat.master
    torch.testing.assert_close(one, three, rtol=1e-4, atol=1e-6)
    for replica in several.replicas[1:]:
        assert torch.equal(replica.flat.master, three)


@pytest.mark.slow
def test_mixed_order_trains_on_every_batch_once(tmp_path):
    trainer = small_trainer(
        tmp_path,
        "queue.ordered=false",
        'drafter.devices=["cpu:0", "cpu:1"]',
        'target.devices=["cpu:0", "cpu:1"]',
    )
    result = trainer.run()
    trainer.observer.close()
    seen = sorted(index for row in result.scalars for index in row.plan_indices)
    assert seen == list(range(12))
    assert checkpoint.load(result.checkpoint).progress == Progress(6, 12)


@pytest.mark.slow
@pytest.mark.parametrize("drafters", ['["cpu"]', '["cpu:0", "cpu:1"]'])
def test_a_stopped_run_resumes_as_if_nothing_had_happened(tmp_path, drafters):
    whole = losses(small_trainer(tmp_path, f"drafter.devices={drafters}", name="whole"))

    class StopAt(Hooks):
        def after_step(self, step, tokens):
            return step < 2

    first = small_trainer(tmp_path, f"drafter.devices={drafters}", name="halves", hooks=StopAt())
    head = losses(first)
    assert 3 <= len(head) < 6
    assert not first.result.finished
    second = small_trainer(tmp_path, f"drafter.devices={drafters}", name="halves")
    assert second._base.step == len(head)
    assert head + losses(second) == whole


@pytest.mark.slow
def test_a_checkpoint_in_the_middle_is_the_state_at_its_step(tmp_path):
    whole = losses(
        settled_trainer(tmp_path, "train.checkpoint_every=2", "train.keep_checkpoints=9", name="whole")
    )
    paths = checkpoint.checkpoints(tmp_path / "whole" / "checkpoints")
    assert [path.name[-1] for path in paths] == ["2", "4", "6"]
    middle = checkpoint.load(paths[1])
    resumed = small_trainer(
        tmp_path, "train.checkpoint_every=2", "train.keep_checkpoints=9", name="other", resume=middle
    )
    assert losses(resumed) == whole[4:]


def test_tokens_are_those_of_the_plan(tmp_path):
    trainer = small_trainer(tmp_path)
    result = trainer.run()
    trainer.observer.close()
    samples = trainer.inputs.dataset.samples
    expected = sum(
        len(samples[i].input_ids)
        for row in result.scalars
        for p in row.plan_indices
        for i in trainer.sample_ids(p)
    )
    assert result.tokens == expected > 0


def test_a_loss_that_is_not_finite_ends_the_run_and_names_its_samples(tmp_path):
    trainer = small_trainer(tmp_path, "train.steps=200")
    trainer.replicas[0].flat.working.fill_(math.nan)
    with pytest.raises(WorkerFailed, match=r"step 0: loss is nan; batches \[0\], samples"):
        trainer.run()
    assert trainer.supervisor.running("") is False
    assert not checkpoint.checkpoints(tmp_path / "run" / "checkpoints")
    trainer.observer.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpace", "kd"])
def test_every_objective_runs(tmp_path, kind):
    assert all(
        math.isfinite(loss) for loss in losses(small_trainer(tmp_path, f"objective.kind={kind}", name=kind))
    )


def test_packed_rows_run(tmp_path):
    trainer = small_trainer(tmp_path, "data.pack=true")
    assert any(sample.document_ids is not None for sample in trainer.inputs.dataset.samples)
    assert all(math.isfinite(loss) for loss in losses(trainer))


def test_step_scalars_are_dataclasses_of_plain_numbers(tmp_path):
    trainer = small_trainer(tmp_path, "train.steps=2")
    row = trainer.run().scalars[-1]
    trainer.observer.close()
    assert dataclasses.is_dataclass(row)
    assert isinstance(row.loss, float)
    metrics = row.metrics(lr=0.1)
    assert {
        "train/loss",
        "train/accept_length",
        "train/grad_norm",
        "train/lr",
        "train/slot_1_accuracy",
    } <= metrics.keys()
    assert 1.0 <= row.accept_length <= 4.0


@pytest.mark.slow
def test_a_run_starts_from_a_released_drafter(tmp_path):
    from dflash.pipeline.trained import load_trained
    from dflash.release.export import export

    first = small_trainer(tmp_path, "train.steps=40", name="first")
    before = losses(first)
    trained = load_trained(tmp_path / "first")
    last = json.loads((trained.path / "state.json").read_text())["history"]["last"]
    assert len(last) == 40
    assert trained.logged_tau == pytest.approx(sum(point[2] for point in last[-4:]) / 4)
    export(trained.shape, trained.tensors, first.inputs.info, tmp_path / "released")
    warm = losses(small_trainer(tmp_path, f"drafter.init={tmp_path / 'released'}", name="second"))
    assert warm[0] < 0.8 * before[0]


@pytest.mark.slow
def test_a_drafter_of_another_size_is_no_start(tmp_path):
    from dflash.pipeline.trained import load_trained
    from dflash.release.export import export
    from steptime.errors import UserError

    first = small_trainer(tmp_path, name="first")
    losses(first)
    trained = load_trained(tmp_path / "first")
    export(trained.shape, trained.tensors, first.inputs.info, tmp_path / "released")
    with pytest.raises(UserError, match=r"drafter\.init"):
        small_trainer(tmp_path, f"drafter.init={tmp_path / 'released'}", "drafter.layers=3", name="second")
