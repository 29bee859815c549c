"""`dflash train` on ranks that are processes of their own: one is killed, one is told wrong things."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dflash.pipeline import checkpoint
from tests.pipeline.run import SMALL, write_ids
from tests.waiting import HANG_S, wait_until

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * HANG_S)]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port


def start(folder: Path, ranks: int, *settings: str, **of_rank: tuple[str, ...]) -> list[subprocess.Popen]:
    """The ranks of one run, as torchrun would start them.

    Args:
        of_rank: more settings of one rank: `rank1=("train.lr=1",)`.
    """
    if not (folder / "ids.jsonl").exists():
        write_ids(folder / "ids.jsonl")
    port, found = free_port(), []
    for rank in range(ranks):
        place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        environment = os.environ | {key: str(value) for key, value in place.items()}
        environment |= {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "dflash", "train", "--out", str(folder / "run")]
        for setting in (
            *SMALL,
            f"data.path={folder / 'ids.jsonl'}",
            f"data.cache={folder / f'cache{rank}'}",
            *settings,
            *of_rank.get(f"rank{rank}", ()),
        ):
            command += ["--set", setting]
        found.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    return found


def ends(processes: list[subprocess.Popen]) -> list[tuple[int, str]]:
    """Exit code and last line of each."""
    found = []
    for process in processes:
        _, said = process.communicate(timeout=2 * HANG_S)
        lines = [line for line in said.splitlines() if line.startswith("dflash: ")]
        found.append((process.returncode, lines[-1] if lines else ""))
    return found


@pytest.mark.fault
def test_a_killed_rank_ends_the_other_with_a_checkpoint_that_one_process_goes_on_from(tmp_path):
    saved = tmp_path / "run" / "checkpoints" / "latest"
    processes = start(tmp_path, 2, "train.steps=100000", "train.checkpoint_every=2", "queue.ordered=false")
    wait_until(saved.exists)
    processes[1].send_signal(signal.SIGKILL)
    (code, line), (killed, _) = ends(processes)
    assert (code, killed) == (1, -signal.SIGKILL)
    assert "rank 1: no sign of life for" in line
    assert f"its last checkpoint is {tmp_path / 'run'}" in line
    state = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert state.progress.step >= 2
    settings = ("train.steps=100000", "queue.ordered=false", "train.checkpoint_every=2")
    (alone,) = start(tmp_path, 1, *settings)
    wait_until(
        lambda: checkpoint.newest(tmp_path / "run" / "checkpoints").progress.step > state.progress.step
    )
    alone.send_signal(signal.SIGTERM)
    ((code, _),) = ends([alone])
    assert code == 128 + signal.SIGTERM
    state = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert state.settings["train.accumulation"] == 2
    assert state.settings["ranks"] == 1


@pytest.mark.fault
def test_other_settings_on_one_rank_are_one_line_each(tmp_path):
    (first, said), (second, line) = ends(start(tmp_path, 2, rank1=("train.lr=0.5",)))
    assert (first, second) == (1, 2)
    assert "train.lr is 0.01 on rank 0 and 0.5 on rank 1" in line
    assert "rank 1: UserError: the ranks' settings differ: train.lr" in said


@pytest.mark.fault
def test_another_number_of_drafters_is_one_line(tmp_path):
    codes = ends(start(tmp_path, 2, rank1=('drafter.devices=["cpu", "cpu:1"]',)))
    assert [code for code, _ in codes] == [2, 2]
    assert "the ranks have [1, 2] drafters; each must have as many" in codes[0][1]


@pytest.mark.fault
def test_a_rank_that_waits_in_vain_says_for_whom(tmp_path):
    alone = start(tmp_path, 2, "train.rank_timeout_s=3")
    alone[1].kill()
    (code, line), _ = ends(alone)
    assert code == 2
    assert "rank 0 of 2 did not meet the others at 127.0.0.1:" in line
