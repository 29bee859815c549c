"""The held-out loss: measured behind the step without a sync, right; by it the best checkpoint is kept."""

from __future__ import annotations

import json

import pytest
import torch

from dflash.observe.syncs.guard import GuardScopes
from dflash.pipeline import checkpoint
from dflash.pipeline.heldout import Heldout
from steptime.errors import UserError
from tests.pipeline.run import losses, settled_trainer, small_trainer, write_ids
from tests.waiting import HANG_S

pytestmark = pytest.mark.timeout(2 * HANG_S)


@pytest.fixture
def data(tmp_path):
    return f"data.heldout={write_ids(tmp_path / 'heldout.jsonl', samples=6)}"


def measured(trainer) -> dict[int, float]:
    lines = (trainer.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for line in lines if (row := json.loads(line))["kind"] == "train"]
    return {row["step"]: row["values"]["heldout/loss"] for row in rows if "heldout/loss" in row["values"]}


@pytest.mark.slow
def test_it_is_the_loss_of_the_weights_at_that_step_and_changes_no_step(tmp_path, data):
    plain = losses(small_trainer(tmp_path, name="plain"))
    trainer = settled_trainer(
        tmp_path,
        *(data, "train.heldout_every=3", "train.checkpoint_every=2", "train.keep_checkpoints=9"),
        scopes=GuardScopes("disallow"),
    )
    assert losses(trainer) == plain
    found = measured(trainer)
    assert set(found) == {2, 3, 4, 6}
    # The same weights, put back into another drafter, give the same number.
    state = checkpoint.load(tmp_path / "run" / "checkpoints" / "step-00000002")
    other = small_trainer(tmp_path, data, name="other", resume=state)
    assert other.saving.heldout.now() == found[2]
    assert other.saving.heldout.now() != found[4]
    other.observer.close()
    accounts = {account.name: account for account in trainer.observer.accounts()}
    assert accounts["heldout"].seconds > 0.0
    assert trainer.saving.heldout.looks == 4


@pytest.mark.slow
def test_the_best_checkpoint_is_kept_also_by_a_run_that_goes_on(tmp_path, data, monkeypatch):
    worth = {2: 3.0, 4: 1.0, 6: 2.0, 8: 1.5}
    real = Heldout.take

    def told(self):
        import dataclasses

        return [dataclasses.replace(row, loss=worth[row.step]) for row in real(self)]

    monkeypatch.setattr(Heldout, "take", told)
    monkeypatch.setattr(Heldout, "now", lambda self: worth[int(self._replica.optimizer.steps)])
    every = (data, "train.checkpoint_every=2", "train.keep_checkpoints=1")
    losses(settled_trainer(tmp_path, *every))
    folder = tmp_path / "run" / "checkpoints"
    assert [path.name[-1] for path in checkpoint.checkpoints(folder)] == ["4", "6"]
    losses(settled_trainer(tmp_path, *every, "train.steps=8"))
    assert [path.name[-1] for path in checkpoint.checkpoints(folder)] == ["4", "8"]
    assert checkpoint.heldout_of(folder / checkpoint.BEST) == 1.0
    assert (folder / checkpoint.BEST).resolve().name[-1] == "4"


def test_a_file_without_samples_is_one_line(tmp_path):
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(UserError) as caught:
        small_trainer(tmp_path, f"data.heldout={tmp_path / 'none.jsonl'}")
    assert "none.jsonl" in str(caught.value)


@pytest.mark.parametrize("kind", ["ce", "kd"])
def test_nothing_of_it_reaches_the_gradients(tmp_path, data, kind):
    trainer = small_trainer(tmp_path, data, f"objective.kind={kind}")
    before = trainer.replicas[0].flat.grad.clone()
    assert trainer.saving.heldout.now() == trainer.saving.heldout.now()
    assert torch.equal(trainer.replicas[0].flat.grad, before)
    trainer.observer.close()
