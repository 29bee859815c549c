"""Checkpoints: whole or absent, and the place in the plan kept exactly."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash.data.batch import BatchSpec
from dflash.pipeline import checkpoint
from dflash.pipeline.checkpoint import State
from dflash.pipeline.progress import Progress, RemainingPlan, progress_after
from steptime.errors import UserError
from tests.pipeline.parts import reseal


class CountingPlan:
    def spec(self, i: int) -> BatchSpec:
        return BatchSpec(index=i, anchor_seed=i, sample_ids=(i,), bucket=8)


def state(step: int = 3) -> State:
    tensors = {"master": torch.arange(5.0), "exp_avg": torch.ones(5)}
    return State(Progress(step, step * 2, (9, 11)), tensors, {"layers": 2}, {"train.steps": 9}, "samples")


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
    with pytest.raises(checkpoint.NotWritten, match="disk full"):
        checkpoint.save(tmp_path, state(2), keep=2)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-00000001"]
    assert checkpoint.load(checkpoint.checkpoints(tmp_path)[-1]).progress.step == 1


def flip(path: Path, byte: int) -> None:
    """One bit of a file, the other way round."""
    data = bytearray(path.read_bytes())
    data[byte] ^= 4
    path.write_bytes(data)


def refused(path: Path, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        checkpoint.load(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.fault
@pytest.mark.parametrize("name", [checkpoint.WEIGHTS, checkpoint.RECORD])
@pytest.mark.parametrize("byte", [0, 20, -1])
def test_one_flipped_bit_is_refused_by_the_files_name(tmp_path, name, byte):
    path = checkpoint.save(tmp_path, state(), keep=2)
    flip(path / name, byte)
    refused(path, f"{name}: damaged")


@pytest.mark.fault
@pytest.mark.parametrize("name", [checkpoint.WEIGHTS, checkpoint.RECORD, checkpoint.SUMS])
def test_a_missing_file_is_refused_by_its_name(tmp_path, name):
    path = checkpoint.save(tmp_path, state(), keep=2)
    (path / name).unlink()
    refused(path, f"{name}: cannot be read: No such file")


GOOD = json.loads(json.dumps(checkpoint._record(state())))


@pytest.mark.fault
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{broken", "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"[]", "schema 'list'"),
        (b'{"schema": "other/9"}', "other/9"),
        (b'{"schema": "dflash-checkpoint/1", "progress": {}}', "dflash-checkpoint/1"),
        (b'{"schema": "dflash-checkpoint/2"}', "progress: Field required"),
        (GOOD | {"progress": {"step": 1_000_000, "floor": 6, "ahead": []}}, "says step 1000000"),
        (GOOD | {"progress": {"step": -3, "floor": 6, "ahead": []}}, "progress.step"),
        (GOOD | {"progress": {"step": "3", "floor": 6, "ahead": []}}, "progress.step"),
        (GOOD | {"more": 1}, "more"),
    ],
)
def test_an_impossible_record_is_refused_in_one_line(tmp_path, content, words):
    path = checkpoint.save(tmp_path, state(), keep=2)
    (path / checkpoint.RECORD).write_bytes(
        content if isinstance(content, bytes) else json.dumps(content).encode()
    )
    reseal(path)
    refused(path, words)


@pytest.mark.fault
def test_weights_that_are_none_are_refused_in_one_line(tmp_path):
    path = checkpoint.save(tmp_path, state(), keep=2)
    (path / checkpoint.WEIGHTS).write_bytes(b"short")
    reseal(path)
    refused(path, f"{checkpoint.WEIGHTS}: cannot be read")


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"master": (5,)}, "'exp_avg' is none of ours"),
        ({"master": (5,), "exp_avg": (5,), "fc": (1,)}, "'fc' is missing"),
        ({"master": (5,), "exp_avg": (2, 2)}, r"'exp_avg' is \(5,\), this drafter's \(2, 2\)"),
    ],
)
def test_tensors_of_another_drafter_are_named(shapes, words):
    with pytest.raises(UserError, match=words):
        checkpoint.check_fits(state(), shapes)
    checkpoint.check_fits(state(), {"master": (5,), "exp_avg": (5,)})


@pytest.mark.fault
def test_a_damaged_newest_one_names_the_whole_one_beside_it(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, state(step), keep=9)
    flip(tmp_path / "step-00000003" / checkpoint.WEIGHTS, -1)
    flip(tmp_path / "step-00000002" / checkpoint.RECORD, 5)
    with pytest.raises(UserError, match=r"step-00000001 beside it is whole: after `rm -r .*step-00000003`"):
        checkpoint.newest(tmp_path)
    flip(tmp_path / "step-00000001" / checkpoint.RECORD, 5)
    with pytest.raises(UserError, match="no whole one"):
        checkpoint.newest(tmp_path)


def test_sums_are_those_of_sha256sum(tmp_path):
    path = checkpoint.save(tmp_path, state(), keep=2)
    before = (path / checkpoint.SUMS).read_text()
    reseal(path)
    assert (path / checkpoint.SUMS).read_text() == before


def test_views_of_one_buffer_are_written_as_tensors_of_their_own(tmp_path):
    buffer = torch.arange(128.0)
    tensors = {"a": buffer[:5], "b": buffer[64:70].view(2, 3)}
    read = checkpoint.load(checkpoint.save(tmp_path, State(Progress(1, 1), tensors, {}), keep=1)).tensors
    assert torch.equal(read["a"], buffer[:5])
    assert torch.equal(read["b"], buffer[64:70].view(2, 3))


def test_latest_leads_to_the_newest_and_the_best_outlives_it(tmp_path):
    first = checkpoint.save(tmp_path, state(1), keep=1)
    checkpoint.mark(first, checkpoint.BEST)
    for step in (2, 3):
        checkpoint.save(tmp_path, state(step), keep=1)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-00000001", "step-00000003"]
    assert checkpoint.load((tmp_path / checkpoint.LATEST).resolve()).progress.step == 3
    assert checkpoint.load((tmp_path / checkpoint.BEST).resolve()).progress.step == 1


def test_one_of_the_same_step_is_replaced(tmp_path):
    checkpoint.save(tmp_path, state(3), keep=2)
    other = State(state(3).progress, {"master": torch.full((5,), 7.0)}, {})
    path = checkpoint.save(tmp_path, other, keep=2)
    assert torch.equal(checkpoint.load(path).tensors["master"], torch.full((5,), 7.0))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["latest", "step-00000003"]


@pytest.mark.fault
def test_leftovers_are_removed_and_a_run_killed_between_two_renames_keeps_its_checkpoint(tmp_path):
    whole = checkpoint.save(tmp_path, state(1), keep=2)
    draft = checkpoint.write(tmp_path, state(2))
    whole.rename(tmp_path / ".step-00000001.77.old")
    assert checkpoint.checkpoints(tmp_path) == []
    assert checkpoint.remove_leftovers(tmp_path) == [".step-00000001.77.old", draft.name]
    assert checkpoint.checkpoints(tmp_path) == [whole]
    assert checkpoint.load(whole).progress.step == 1
    assert not draft.exists()


@pytest.mark.fault
def test_no_room_is_one_line_with_path_and_bytes_and_leaves_nothing(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        checkpoint.NotWritten, match=r"step-00000003: cannot write 40 bytes: No space left"
    ) as no:
        checkpoint.save(tmp_path, state(), keep=2)
    assert str(no.value).startswith(str(tmp_path / "step-00000003"))
    assert "(1,000 bytes free)" in str(no.value)
    assert list(tmp_path.iterdir()) == []
