"""Checkpoints: whole or absent, and the place in the plan kept exactly."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash.data.batch import BatchSpec
from dflash.pipeline import checkpoint
from dflash.pipeline.checkpoint import Progress, RemainingPlan, State, progress_after
from steptime.errors import UserError


class CountingPlan:
    def spec(self, i: int) -> BatchSpec:
        return BatchSpec(index=i, anchor_seed=i, sample_ids=(i,), bucket=8)


def state(step: int = 3) -> State:
    tensors = {"master": torch.arange(5.0), "exp_avg": torch.ones(5)}
    return State(Progress(step, step * 2, (9, 11)), tensors, {"layers": 2}, "abc")


@given(st.sets(st.integers(0, 40)), st.integers(0, 30))
def test_what_is_left_of_a_plan_is_what_was_not_consumed(consumed, tail):
    progress = progress_after(1, Progress(), consumed)
    plan = RemainingPlan(CountingPlan(), progress)
    left = [plan.spec(i).index for i in range(tail)]
    expected = [i for i in range(200) if i not in consumed][:tail]
    assert left == expected


def test_progress_goes_on_from_progress():
    first = progress_after(1, Progress(), {0, 2, 3})
    assert (first.floor, first.ahead) == (1, (2, 3))
    second = progress_after(2, first, {1, 5})
    assert (second.floor, second.ahead) == (4, (5,))


def test_round_trip(tmp_path):
    path = checkpoint.save(tmp_path, state(), keep=2)
    read = checkpoint.load(path)
    assert read.progress == state().progress
    assert read.drafter_shape == {"layers": 2}
    assert torch.equal(read.tensors["master"], state().tensors["master"])


def test_only_the_newest_are_kept(tmp_path):
    for step in range(1, 5):
        checkpoint.save(tmp_path, state(step), keep=2)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-00000003", "step-00000004"]


def test_a_crash_while_writing_leaves_the_last_one_whole(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, state(1), keep=2)
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(tmp_path, state(2), keep=2)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-00000001"]
    assert checkpoint.load(checkpoint.checkpoints(tmp_path)[-1]).progress.step == 1


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("state.json", "{broken", "cannot read"),
        ("state.json", '{"schema": "other/9"}', "other/9"),
        ("state.safetensors", "short", "cannot read"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_line(tmp_path, name, content, words):
    path = checkpoint.save(tmp_path, state(), keep=2)
    (path / name).write_text(content)
    with pytest.raises(UserError, match=words) as caught:
        checkpoint.load(path)
    assert "\n" not in str(caught.value)
