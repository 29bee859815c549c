"""The acceptance length in decoding: as `dflash eval` counts it, and it changes no step."""

from __future__ import annotations

import json
import threading
from collections import defaultdict

import pytest
import torch

from dflash.commands.eval import build
from dflash.config import Config
from dflash.decode.evaluate import evaluate
from dflash.decode.figures import summarise
from dflash.decode.generate import decode_plainly
from dflash.decode.prompts import read_prompts, stop_ids
from dflash.device import Device
from dflash.models.target import load_target
from dflash.observe.syncs.guard import GuardScopes
from dflash.pipeline.build import prepare_inputs
from dflash.pipeline.heldout import Heldout
from dflash.pipeline.history import History
from dflash.pipeline.scalars_log import StepScalars
from dflash.pipeline.summary import text
from dflash.pipeline.tau import Tau, held_out_prompts
from dflash.pipeline.trained import load_trained
from dflash.pipeline.trainer import TrainResult
from tests.pipeline.run import losses, settled_trainer, small_config, small_trainer, write_ids
from tests.waiting import HANG_S

pytestmark = pytest.mark.timeout(2 * HANG_S)
LOOKS = ("train.heldout_every=3", "train.tau_prompts=2", "train.tau_tokens=8")


@pytest.fixture
def data(tmp_path):
    return f"data.heldout={write_ids(tmp_path / 'heldout.jsonl', samples=6)}"


def rows(trainer) -> dict[int, float]:
    lines = (trainer.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return {row["step"]: row["values"]["train/tau"] for row in found if "train/tau" in row["values"]}


def evaluated(trainer, step: int, file) -> float:
    """τ as `dflash eval` has it, of a checkpoint."""
    trained = load_trained(trainer.run_dir / "checkpoints" / f"step-{step:08}")
    target = load_target(trainer.config.target, Device("cpu"))
    prompts = read_prompts(file, None, 64, limit=3, context=0, max_new_tokens=16)
    drafter = build(target, trained.shape, trained.tensors, "checkpoint")
    results = evaluate(target, drafter, prompts, max_new_tokens=16, stop_ids=stop_ids(target, None))
    return summarise(results, trained.shape.block_size).tau


def own_text(folder) -> None:
    """Data that a drafter learns to foresee within some steps: a few texts of the target's own."""
    target = load_target(small_config(folder).target, Device("cpu"))
    prompts = [[(3 * index + 5 * place) % 60 + 1 for place in range(5)] for index in range(3)]
    with (folder / "ids.jsonl").open("w") as sink:
        for prompt, row in zip(prompts, decode_plainly(target, prompts, max_new_tokens=40).rows, strict=True):
            sink.write(
                json.dumps({"input_ids": [*prompt, *row.tokens], "loss_mask": [0] * 5 + [1] * 40}) + "\n"
            )


@pytest.mark.slow
def test_it_equals_the_evaluation_of_the_same_weights_and_changes_no_step(tmp_path):
    own_text(tmp_path)
    settings = ("train.steps=60", "train.lr=0.006", "drafter.mask_in_data=true")
    plain = losses(small_trainer(tmp_path, *settings, name="plain"))
    looks = ("train.heldout_every=20", "train.tau_prompts=3", "train.tau_tokens=16")
    saves = ("train.checkpoint_every=30", "train.keep_checkpoints=9")
    data = f"data.heldout={tmp_path / 'ids.jsonl'}"
    trainer = settled_trainer(tmp_path, data, *settings, *looks, *saves)
    assert losses(trainer) == plain
    found = rows(trainer)
    assert set(found) == {20, 30, 40, 60}  # every so many steps, each checkpoint, the end
    assert found[60] > max(1.0, found[20]), "nothing was learnt, so nothing is shown"
    for step in (30, 60):
        assert evaluated(trainer, step, tmp_path / "ids.jsonl") == pytest.approx(found[step])
    history = trainer.result.history
    assert history.last_tau == (60, found[60])
    assert history.first_tau == (20, found[20])
    assert 0.0 < history.evaluating_seconds < history.seconds
    assert history.running_s == history.seconds - history.evaluating_seconds - history.stalled_seconds
    accounts = {account.name: account for account in trainer.observer.accounts()}
    assert accounts["tau"].seconds == pytest.approx(history.evaluating_seconds)


def test_training_is_said_to_stand_still_for_all_of_it(tmp_path, data, monkeypatch):
    """MFU and the bottleneck leave that time out."""
    standing: list[bool] = []
    for owner in (Tau, Heldout):
        look = owner.look

        def seen(self, steps_done, look=look):
            standing.append(bool(trainer.observer.standing._since_ns))
            look(self, steps_done)

        monkeypatch.setattr(owner, "look", seen)
    trainer = small_trainer(tmp_path, data, *LOOKS, "train.steps=4")
    trainer.run()
    total_ns = trainer.observer.standing.ns(0)
    assert standing
    assert all(standing)
    assert total_ns >= trainer.saving.tau.seconds * 1e9 > 0
    assert not trainer.observer.standing._since_ns


@pytest.mark.slow
def test_its_waits_are_declared_and_no_others_come(tmp_path, data):
    few = ("train.steps=2", "train.heldout_every=1", "train.tau_prompts=1", "train.tau_tokens=3")
    trainer = small_trainer(tmp_path, data, *few, scopes=GuardScopes("disallow"))
    losses(trainer)
    assert set(rows(trainer)) == {1, 2}


def test_its_target_shares_the_weights_and_nothing_that_a_pass_changes(tmp_path, data):
    trainer = small_trainer(tmp_path, data, *LOOKS)
    one, twin = trainer._targets[0], trainer.saving.tau._target
    assert [id(p) for p in one.model.parameters()] == [id(p) for p in twin.model.parameters()]
    assert not {id(module) for module in one.model.modules()} & {
        id(module) for module in twin.model.modules()
    }
    assert one.text_model.config is not twin.text_model.config
    ids = torch.arange(1, 9)[None]
    before = one.taps(ids)
    with twin.recording() as taken:
        inside = one.taps(ids)  # as another thread does while this one decodes
    assert taken == []
    assert all(torch.equal(a, b) for a, b in zip(before, inside, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, twin.taps(ids), strict=True))
    trainer.observer.close()


def test_a_run_without_a_prompt_to_decode_goes_without_and_says_why(tmp_path, capsys):
    row = {"input_ids": [1, 2, 3, 4, 5, 6, 7, 8], "loss_mask": [1] * 8}
    (tmp_path / "all.jsonl").write_text(json.dumps(row) + "\n")
    trainer = small_trainer(tmp_path, f"data.heldout={tmp_path / 'all.jsonl'}", "train.tau_prompts=1")
    assert trainer.saving.tau is None
    assert trainer.saving.heldout is not None
    line = capsys.readouterr().err
    assert "no train/tau" in line
    assert "all.jsonl:1" in line
    trainer.observer.close()


def test_a_long_prompt_is_left_out(tmp_path):
    lines = [
        json.dumps({"input_ids": [1] * (size + 2), "loss_mask": [0] * size + [1, 1]}) for size in (70, 5, 6)
    ]
    (tmp_path / "some.jsonl").write_text("\n".join(lines) + "\n")
    inputs = prepare_inputs(
        small_config(tmp_path, f"data.heldout={tmp_path / 'some.jsonl'}", "train.tau_prompts=2")
    )
    assert [len(prompt) for prompt in held_out_prompts(inputs)] == [5, 6]


def test_it_is_off_where_no_prompt_is_asked_for_and_when_the_run_ends_at_once(tmp_path, data):
    off = small_trainer(tmp_path, data, "train.tau_prompts=0")
    assert off.saving.tau is None
    off.observer.close()
    trainer = small_trainer(tmp_path, data, *LOOKS)
    tau = trainer.saving.tau
    trainer.supervisor.stopping.set()
    tau.look(3)
    assert tau.take() == []
    assert tau.seconds == 0.0
    trainer.observer.close()


def test_the_watchdog_sees_it_move(tmp_path, data, monkeypatch):
    seen = []
    monkeypatch.setattr(Tau, "now", lambda self: seen.append(self.decoded) or 1.5)
    trainer = small_trainer(tmp_path, data, *LOOKS)
    watched = trainer._make_watchdog()._watched
    monkeypatch.setattr(trainer.supervisor, "threads", lambda: defaultdict(threading.current_thread))
    before = watched()[-1].moves
    trainer.saving.tau.look(3)
    assert (seen, watched()[-1].moves) == ([1], before + 2)
    assert [(look.step, look.tau) for look in trainer.saving.tau.take()] == [(3, 1.5)]
    trainer.observer.close()


def test_a_history_of_an_earlier_version_is_read():
    tree = History().as_dict()
    for name in ("evaluating_seconds", "first_tau", "last_tau"):
        del tree[name]
    assert History.from_dict(tree) == History()


def test_the_closing_lines_name_it(tmp_path):
    result = TrainResult(finished=True, checkpoint=None)
    result.history.add(StepScalars(0, 2.0, 1.2, (0.2, 0.1, 0.1), 1.0, 10, ()))
    result.history.seconds, result.history.tokens = 12.0, 1000
    assert "tau" not in text(Config(), result, tmp_path)
    result.history.decoded(1, float("nan"), 1.0)
    result.history.decoded(2, 1.25, 0.5)
    result.history.decoded(4, 2.5, 0.5)
    said = text(Config(), result, tmp_path)
    assert "1.250 -> 2.500 in decoding, after 2 and 4 steps (2.0 s, not in tok/s)" in said
    assert "100 tok/s" in said
