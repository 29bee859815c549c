"""The page and its judgement, without a GPU; and what the program says where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import cli
from bench.syncs.faults import gpu_check
from bench.syncs.faults.gpu_check import Check, Deadline, disagreements, page, predictions


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_exit_4_and_no_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["gpu-check", "--out", str(tmp_path / "out")]) == 4
    assert (
        capsys.readouterr().err == "error: no CUDA device here; nothing was checked and no page is written\n"
    )
    assert not (tmp_path / "out").exists()


def test_agreement_and_disagreement() -> None:
    predicted = {"item": True, "full": False, "asynchronous copy in from pageable memory": True}
    agree = {
        "GPU trace": {"item": {"stream sync": 1}, "full": {}},
        "CUPTI": {"item": {"stream synchronize": 1, "copy to host": 1}, "full": {"kernel": 1}},
        "copy wrappers": {"asynchronous copy in from pageable memory": {"pageable copy": 1}},
    }
    assert disagreements(predicted, agree) == []
    blind = agree | {"GPU trace": {"item": {}, "full": {"stream sync": 1}}}
    lines = disagreements(predicted, blind)
    assert len(lines) == 4
    assert lines[0] == "item: the CPU ways predict a wait, GPU trace counts {}"
    assert "CUPTI 1" in lines[1]


def test_predictions_are_the_truth_table() -> None:
    from bench.syncs.faults.truth import CASES

    assert predictions() == {case.name: case.waits for case in CASES}


def test_page_shows_what_was_missed_and_what_was_not_run() -> None:
    check = Check(
        gpu="Some GPU",
        versions={"torch": "2.13"},
        left_out=["CUPTI: not installed"],
        problems=["modes: planted item"],
    )
    check.faults = {
        "modes": {
            "item": {"claimed": True, "hits": {}},
            "mask_read": {"claimed": True, "hits": {"read by mask": 3}},
        }
    }
    check.predicted = {"item": True}
    check.truth = {"GPU trace": {"item": {"stream sync": 1}}}
    check.event_ns = {"record pair": 3200.0}
    cost = dict.fromkeys(gpu_check.ADDED, 0) | {
        "name": "profile",
        "isolated": None,
        "accounted_percent": 0.01,
    }
    check.overhead = {"collectors": [cost], "all": None, "verdict": "within", "exit_code": 0}
    text = page(check)
    for word in (
        "Some GPU",
        "**missed**",
        "read by mask",
        "CUPTI: not installed",
        "1 stream sync",
        "3200",
        "0.01",
        "not run",
    ):
        assert word in text


def test_a_child_that_fails_is_a_problem_and_one_that_cannot_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = Check(gpu="", versions={})
    for code, line in (
        (4, "error: CUPTI: unavailable: no package"),
        (1, "boom"),
        (124, "not finished after 3 s"),
    ):
        monkeypatch.setattr(
            gpu_check, "child", lambda arguments, limit, code=code, line=line: (code, "", line)
        )
        assert gpu_check.run_json(check, "x", [], 3.0) is None
    assert check.left_out == ["x: error: CUPTI: unavailable: no package"]
    assert check.problems == ["x: exit code 1: boom", "x: exit code 124: not finished after 3 s"]


def test_deadline_hands_out_what_is_left() -> None:
    now_s = 7.0
    deadline = Deadline(100.0, lambda: now_s)
    assert deadline.left(30.0) == 30.0
    now_s += 80.0
    assert (deadline.spent_s, deadline.left(30.0)) == (80.0, 20.0)
    now_s += 80.0
    assert deadline.left(30.0) == 1.0
    for_ever = "import threading; threading.Event().wait()"
    assert gpu_check.child(["-c", for_ever], 0.2)[0] == 124


@pytest.mark.gpu
def test_the_cost_of_an_event_pair_is_measured() -> None:
    assert gpu_check.event_cost()["record pair"] > 0
