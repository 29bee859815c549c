"""The check as a whole, with stub stages: what is red, what is left on disk, and what happens without a
GPU."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from bench import cli
from bench.commands import gpu_check
from bench.gpu_check.conductor import LIMIT_S, run_stages
from bench.gpu_check.page import Heading, page
from bench.gpu_check.registry import STAGES
from bench.gpu_check.stage import OUTCOME, judge, not_run
from steptime.child_process import run
from steptime.records.types import Commit, Machine
from tests.bench.gpu_check import stubs
from tests.waiting import wait_until

HEADING = Heading(
    "2026-12-01T00:00:00Z",
    Machine(
        "1x-h200-abcd1234", "Some CPU", 16, (("NVIDIA H200", "aaaa"),), {"torch": "2.13", "driver": "580"}
    ),
    Commit("c0ffee", dirty=True, diff_hash="d1ff"),
)


def check(
    stages: list[Any], folder: Path, monkeypatch: pytest.MonkeyPatch, page_path: Path | None = None
) -> int:
    """The command on a machine that has a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return gpu_check.check(stages, str(folder), page_path)


def test_all_as_claimed_is_0_and_the_page_tells_date_machine_and_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    stages = [stubs.Stub(), stubs.LooksOutside()]
    assert check(stages, tmp_path / "out", monkeypatch, tmp_path / "gpu-check.md") == 0
    text = (tmp_path / "gpu-check.md").read_text()
    assert text == (tmp_path / "out" / "gpu-check.md").read_text()
    assert "Everything as claimed." in text
    for word in ("- date: 20", "- machine: `", "- commit: `", "torch 2", "a note", "| what   | n   |"):
        assert word in text
    left = {f"{name}.{kind}" for name in ("good", "outside") for kind in ("json", "log")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == left | {"gpu-check.md"}
    outside = OUTCOME.validate_json((tmp_path / "out" / "outside.json").read_bytes())
    assert outside.found is not None
    assert outside.found.notes == ("none",), "the job's summary belongs to the whole"
    assert "1 of 2  good: at most 1 min 00 s" in capsys.readouterr().err


RED = {
    stubs.CountsNothing: ("not as claimed", "it looked at nothing (0 operations)"),
    stubs.FindsSomething: ("not as claimed", "drafter/0 waits"),
    stubs.Crashes: ("crashed", "exit code 1: RuntimeError: planted: no kernel image"),
    stubs.EndsWithoutAWord: ("crashed", "it left no result"),
    stubs.GivesNonsense: ("crashed", "its result cannot be read: 2 validation errors for Found"),
}


@pytest.fixture(scope="module")
def red_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a check with every kind of bad stage, and a good one behind them, has left its results."""
    folder = tmp_path_factory.mktemp("red")
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert check([*(stub() for stub in RED), stubs.Stub()], folder, monkeypatch) == 1
    return folder


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("stub", RED, ids=lambda stub: stub.name)
def test_a_stage_that_shows_nothing_is_red(red_folder: Path, stub: type[stubs.Stub]) -> None:
    outcome = OUTCOME.validate_json((red_folder / f"{stub.name}.json").read_bytes())
    assert (outcome.state, outcome.problems) == (RED[stub][0], (RED[stub][1],))
    text = (red_folder / "gpu-check.md").read_text()
    assert f"- **{outcome.problems[0]}**" in text
    assert f"**Red**: {', '.join(one.name for one in RED)}." in text


@pytest.mark.slow
def test_the_stages_behind_a_bad_one_run(red_folder: Path) -> None:
    assert OUTCOME.validate_json((red_folder / "good.json").read_bytes()).state == "as claimed"
    assert "planted: no kernel image" in (red_folder / "crash.log").read_text()


@pytest.mark.slow
@pytest.mark.fault
def test_a_stage_that_hangs_is_killed_with_all_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(stubs.CHILD_ENVIRONMENT, str(tmp_path / "pid"))
    wait = subprocess.Popen.wait

    def until_it_hangs(process: Any, timeout: float | None = None) -> int:
        """Its time is over as soon as it hangs, and no sooner."""
        if timeout is None:
            return wait(process)
        wait_until(lambda: process.poll() is not None or (tmp_path / "pid").exists())
        return wait(process, 0.0)

    monkeypatch.setattr(subprocess.Popen, "wait", until_it_hangs)
    assert check([stubs.Hangs()], tmp_path / "out", monkeypatch) == 1
    outcome = OUTCOME.validate_json((tmp_path / "out" / "hang.json").read_bytes())
    assert (outcome.state, outcome.problems) == ("not finished", ("killed after 5 s",))
    child = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@pytest.mark.fault
def test_a_stage_that_was_not_reached_is_red(tmp_path: Path) -> None:
    """As after Ctrl-C: what ended is on disk, and the page says what did not run."""
    stages = [stubs.Stub(), stubs.FindsSomething()]
    (tmp_path / "problem.json").write_text("of an earlier run")
    outcomes = next(iter(run_stages(stages, tmp_path, lambda line: None)))
    assert [one.state for one in outcomes] == ["as claimed", "not run"]
    assert json.loads((tmp_path / "good.json").read_text())["state"] == "as claimed"
    assert not (tmp_path / "problem.json").exists()
    assert "**Red**: problem." in page(HEADING, outcomes)


def test_a_part_of_the_stages_leaves_the_projects_page_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(STAGES.entries, "good", stubs.Stub())
    monkeypatch.setattr(gpu_check, "PAGE", tmp_path / "docs" / "gpu-check.md")
    assert cli.main(["gpu-check", "--stages", "good", "--out", str(tmp_path / "out")]) == 0
    assert "Only a part of the stages" in (tmp_path / "out" / "gpu-check.md").read_text()
    assert not gpu_check.PAGE.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_would_run_and_exits_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page_path = tmp_path / "gpu-check.md"
    page_path.write_text("as it was")
    monkeypatch.setattr(gpu_check, "PAGE", page_path)
    assert cli.main(["gpu-check", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().out
    for stage in STAGES:
        assert f"\n{stage.name} " in said
        assert f" {stage.seconds}\n" in said
    assert max(map(len, said.splitlines())) <= 90
    assert page_path.read_text() == "as it was"
    assert not (tmp_path / "out").exists()


def test_an_unknown_stage_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["gpu-check", "--stages", "count"]) == 2
    assert "unknown stage 'count'; did you mean 'counts'?" in capsys.readouterr().err


def test_all_stages_together_fit_in_ten_minutes() -> None:
    assert sum(stage.seconds for stage in STAGES) <= LIMIT_S == 600
    assert STAGES.names[0] == "counts"
    for stage in STAGES:
        assert stage.asks.endswith(("?", ")"))


def test_the_page_of_a_red_check() -> None:
    outcomes = [not_run(stage) for stage in STAGES]
    text = page(HEADING, outcomes)
    assert "commit: `c0ffee`, with uncommitted changes d1ff" in text
    assert "NVIDIA H200" in text
    assert text.count("**not run**") == len(STAGES)


def test_a_result_that_is_no_json_is_no_result() -> None:
    ended = run(["true"], limit_s=60.0, folder=Path(os.sep))
    assert judge(stubs.Stub(), ended, b"{").state == "crashed"
    assert judge(stubs.Stub(), ended, b'{"looked_at": 1, "unit": "x"}').state == "as claimed"
