"""Checkpoints behind the step: no sync, no wait, nothing but finite weights, and the rows before them."""

from __future__ import annotations

import json
import math
import threading

import pytest
import torch

from dflash.observe.syncs.guard import GuardScopes
from dflash.pipeline import checkpoint, last_save, saving
from dflash.pipeline.history import History
from dflash.pipeline.progress import Drawn, Progress
from dflash.pipeline.saver import BUFFERS, all_finite
from dflash.pipeline.supervisor import WorkerFailed
from tests.pipeline.run import Hooks, losses, settled_trainer, small_trainer
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.timeout(2 * HANG_S)


def rows(trainer, kind: str) -> list[dict]:
    lines = (trainer.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for line in lines if (row := json.loads(line))["kind"] == kind]


@pytest.mark.slow
@pytest.mark.parametrize("drafters", ['["cpu:0"]', '["cpu:0", "cpu:1"]'])
def test_a_step_waits_for_no_device_while_checkpoints_are_written(tmp_path, drafters):
    """The guard raises at a sync outside `allowed_sync`, and nothing here is declared but the run's end."""
    scopes = GuardScopes("disallow")
    trainer = settled_trainer(
        tmp_path, "train.checkpoint_every=2", f"drafter.devices={drafters}", scopes=scopes
    )
    assert len(losses(trainer)) == 6
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "run" / "checkpoints")] == [
        "step-00000004",
        "step-00000006",
    ]
    assert {reason for _, reason in scopes.ledger.declared} <= {"end of the run: the last scalars"}


@pytest.mark.fault
def test_a_snapshot_that_synced_would_be_found(tmp_path):
    trainer = settled_trainer(tmp_path, "train.checkpoint_every=2", scopes=GuardScopes("disallow"))
    saver = trainer.saving.saver
    take = saver.take

    def reads_the_host(order):
        trainer.replicas[0].flat.master.sum().item()
        return take(order)

    saver.take = reads_the_host
    with pytest.raises(WorkerFailed, match="SyncNotAllowed"):
        trainer.run()
    trainer.observer.close()


@pytest.mark.slow
def test_while_one_is_written_the_next_is_put_off_and_the_step_goes_on(tmp_path, monkeypatch):
    """The writer stands at its first checkpoint until the run has gone on for many steps."""
    released = threading.Event()
    write = checkpoint.write

    def slow(folder, state):
        released.wait()
        return write(folder, state)

    monkeypatch.setattr(checkpoint, "write", slow)
    trainer = small_trainer(
        tmp_path, "train.steps=30", "train.checkpoint_every=3", "train.keep_checkpoints=99"
    )
    boundary = trainer.saving.boundary

    def release_late(worker, agreed):
        if worker.step_index == 20:
            released.set()
            wait_until(lambda: trainer.saving.saver.idle)
        boundary(worker, agreed)

    trainer.saving.boundary = release_late
    assert len(losses(trainer)) == 30
    steps = [checkpoint.load(path).progress.step for path in checkpoint.checkpoints(trainer.saving._folder)]
    assert steps[:2] == [3, 20]
    assert steps[-1] == 30


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("what", ["loss", "weights"])
def test_only_finite_checkpoints_are_kept_and_the_newest_resumes(tmp_path, what):
    """The loss turns NaN at step 5, or the weights do while every loss is fine; checkpoints come each second
    step."""
    trainer = settled_trainer(
        tmp_path, "train.steps=40", "train.checkpoint_every=2", "train.keep_checkpoints=1"
    )
    flat, step = trainer.replicas[0].flat, trainer.replicas[0].optimizer.step

    def poisoned(lr, scale):
        norm = step(lr, scale)
        if trainer.drafter_workers[0].step_index == 4:
            if what == "loss":
                flat.master.fill_(math.nan)
            else:  # a tensor's alignment gap: no loss ever sees it, and no tensor holds it
                trainer.replicas[0].optimizer.exp_avg_sq[0] = math.inf
        return norm

    trainer.replicas[0].optimizer.step = poisoned
    if what == "loss":
        with pytest.raises(WorkerFailed, match=r"step 5: loss is nan"):
            trainer.run()
    else:
        trainer.run()
    trainer.observer.close()
    found = checkpoint.checkpoints(tmp_path / "run" / "checkpoints")
    assert [path.name for path in found] == ["step-00000004"]
    state = checkpoint.load(found[0])
    assert all_finite(state.tensors)
    text = [row["values"]["text"] for row in rows(trainer, "event")]
    if what == "loss":
        assert rows(trainer, "train")[-1]["values"]["train/loss"] == "NaN"
        assert any("step 5: loss is nan" in line for line in text)
    else:
        assert any("are not finite: no checkpoint of them" in line for line in text)
    resumed = small_trainer(tmp_path, "train.steps=40", "train.keep_checkpoints=1")
    assert all(math.isfinite(loss) for loss in losses(resumed))


@pytest.mark.fault
@pytest.mark.parametrize(("where", "words"), [("target", "are not finite"), ("drafter", "behind the target")])
def test_a_nan_is_one_line_that_says_where_it_begins(tmp_path, where, words):
    trainer = small_trainer(tmp_path, "train.steps=40")
    if where == "target":
        modules = trainer._targets[0].model.named_modules()
        norm = next(module for name, module in modules if name.endswith("layernorm"))
        norm.weight.data[0] = math.nan
    else:
        trainer.replicas[0].flat.master.fill_(math.nan)
    with pytest.raises(WorkerFailed, match=f"step 0: loss is nan; batches.*{words}") as caught:
        trainer.run()
    trainer.observer.close()
    assert "\n" not in str(caught.value)
    assert not checkpoint.checkpoints(tmp_path / "run" / "checkpoints")


@pytest.mark.fault
def test_a_checkpoint_comes_after_the_rows_of_its_steps(tmp_path, monkeypatch):
    """What a kill right after the checkpoint would leave."""
    trainer = settled_trainer(
        tmp_path, "train.checkpoint_every=2", "observe.flush_s=1000", "observe.tick_s=1000"
    )
    publish, written = checkpoint.publish, []

    def look(draft):
        written.append([row["step"] for row in rows(trainer, "train")])
        return publish(draft)

    monkeypatch.setattr(checkpoint, "publish", look)
    losses(trainer)
    assert written[0][:2] == [0, 1]
    assert written[1][:4] == [0, 1, 2, 3]
    assert written[-1] == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
def test_the_history_in_a_checkpoint_is_that_of_its_steps(tmp_path):
    trainer = settled_trainer(tmp_path, "train.checkpoint_every=2", "train.keep_checkpoints=9")
    losses(trainer)
    for path in checkpoint.checkpoints(tmp_path / "run" / "checkpoints"):
        state = checkpoint.load(path)
        assert state.history["steps"] == state.progress.step
        assert History.from_dict(state.history).last[-1].step == state.progress.step - 1
    assert state.history["tokens"] == trainer.result.tokens


@pytest.mark.fault
def test_a_writer_that_finds_no_room_says_so_and_training_goes_on(tmp_path, monkeypatch):
    write = checkpoint.write

    def full(folder, state):
        if state.progress.step == 4:
            raise checkpoint.NotWritten(f"{folder}: cannot write 99 bytes: No space left on device")
        return write(folder, state)

    monkeypatch.setattr(checkpoint, "write", full)
    trainer = settled_trainer(tmp_path, "train.checkpoint_every=2", "train.keep_checkpoints=9")
    assert len(losses(trainer)) == 6
    (text,) = [row["values"]["text"] for row in rows(trainer, "event")]
    assert "cannot write 99 bytes" in text
    assert "training goes on, the last one is step-00000002" in text
    assert [path.name[-1] for path in checkpoint.checkpoints(trainer.saving._folder)] == ["2", "6"]


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("way", ["spare", "wait", "give up"])
def test_the_last_weights_are_never_thrown_away_unasked(tmp_path, monkeypatch, way):
    trainer = small_trainer(tmp_path, spare_dir=tmp_path / "spare" if way == "spare" else None)
    write, tries = checkpoint.write, []
    monkeypatch.setattr(last_save, "RETRY_S", 0.0 if way == "wait" else HANG_S)

    def full(folder, state):
        if "spare" not in folder.name:
            tries.append(folder)
            if len(tries) < 4:
                raise checkpoint.NotWritten(f"{folder}: cannot write 99 bytes: No space left on device")
        return write(folder, state)

    monkeypatch.setattr(checkpoint, "write", full)
    text = []

    def told(line, **values):
        text.append(line)
        if way == "give up" and "waiting for room" in line:
            trainer.request_stop()

    monkeypatch.setattr(trainer.observer, "event", told)
    losses(trainer)
    found = trainer.result.checkpoint
    if way == "give up":
        assert found is None
        assert "were given up" in text[-1]
        return
    assert checkpoint.load(found).progress.step == 6
    assert found.parent == (tmp_path / "spare" if way == "spare" else tmp_path / "run" / "checkpoints")
    assert "cannot write 99 bytes" in text[0]
    assert ("move it to" if way == "spare" else "waiting for room") in text[1]


class StopAt(Hooks):
    """Hooks that end the run after so many steps, two at the least."""

    def __init__(self, steps):
        self.steps = steps

    def after_step(self, step, tokens):
        return step < self.steps - 2


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("who", ["target", "drafter in forward", "drafter in its update"])
def test_a_worker_that_raises_loses_no_whole_step(tmp_path, who):
    trainer = small_trainer(tmp_path, "train.steps=100000")
    calls, worker = [0], trainer.drafter_workers[0]

    def after(real):
        def call(*arguments, **named):
            calls[0] += 1
            if calls[0] > 5:
                # A target is ahead: what it queued is trained on before it raises.
                wait_until(lambda: worker.step_index >= 3)
                raise RuntimeError("planted")
            return real(*arguments, **named)

        return call

    if who == "target":
        trainer._targets[0].taps = after(trainer._targets[0].taps)
    elif who == "drafter in forward":
        trainer.replicas[0].drafter.forward = after(trainer.replicas[0].drafter.forward)
    else:
        trainer.replicas[0].optimizer._update = after(trainer.replicas[0].optimizer._update)
    with pytest.raises(WorkerFailed, match="planted"):
        trainer.run()
    trainer.observer.close()
    state = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert worker.step_index > 0
    if who == "drafter in its update":
        assert state is None
        assert any("were lost with its worker" in row["values"]["text"] for row in rows(trainer, "event"))
        return
    assert state is not None
    assert state.progress.step == worker.step_index
    whole = small_trainer(
        tmp_path, "train.steps=100000", name="whole", hooks=StopAt(worker.step_index), resume=None
    )
    whole.run()
    whole.observer.close()
    same = checkpoint.newest(tmp_path / "whole" / "checkpoints")
    assert same is not None
    assert same.progress == state.progress
    assert all(torch.equal(same.tensors[name], tensor) for name, tensor in state.tensors.items())


@pytest.mark.slow
def test_what_mixed_drafters_drew_is_folded_as_the_run_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "FOLD_EVERY", 4)
    mixed = ("queue.ordered=false", 'drafter.devices=["cpu:0", "cpu:1"]')
    trainer = small_trainer(tmp_path, "train.steps=11", *mixed)
    longest, boundary = [0], trainer.saving.boundary

    def look(worker, agreed):
        boundary(worker, agreed)
        longest[0] = max(longest[0], *map(len, trainer.saving.logs))

    trainer.saving.boundary = look
    losses(trainer)
    assert 0 < longest[0] <= 5
    state = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert state.progress == Progress(11, 22)


def test_folding_in_between_changes_nothing():
    from collections import deque

    draws = [(0, 3), (1, 1), (2, 0), (3, 7), (4, 2)]
    at_once, in_parts = deque(draws), deque(draws)
    parted = Drawn(Progress(), [in_parts])
    parted.after(2)
    assert parted.after(4) == Drawn(Progress(), [at_once]).after(4) == Progress(4, 2, (3, 7))
    assert list(in_parts) == [(4, 2)]


def test_a_command_line_run_keeps_no_row_in_memory(tmp_path):
    trainer = small_trainer(tmp_path, keep_scalars=False)
    trainer.run()
    trainer.observer.close()
    assert trainer.result.scalars == []
    assert trainer.result.history.steps == 6


def test_the_copy_is_the_optimizers_state_bit_for_bit(tmp_path):
    trainer = settled_trainer(tmp_path, "train.checkpoint_every=2", "train.steps=6")
    losses(trainer)
    optimizer = trainer.replicas[0].optimizer
    state = checkpoint.newest(tmp_path / "run" / "checkpoints")
    want = checkpoint.flatten(optimizer.state_dict())
    assert want.keys() == state.tensors.keys()
    assert all(torch.equal(want[name], state.tensors[name]) for name in want)
    assert {name.partition("/")[0] for name in want} == {"steps", *BUFFERS}
