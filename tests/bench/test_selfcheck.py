"""The table of error rates: counted and bounded right, and red when the harness was wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import rivals, selfcheck, trials
from bench.gate import pairs
from bench.gate_verdict import HEAD, Evidence, Launch
from bench.plant_check import PlantFound, judge_plant, time_plant
from bench.progress import Reporter
from bench.records import ExactCounts, ExitCode
from bench.selfcheck import (
    Report,
    Row,
    add,
    exit_code,
    judge_again,
    make_rows,
    run_selfcheck,
    share,
    to_json,
    to_markdown,
    to_text,
    turns,
)
from bench.trials import Trial
from dflash.config import Config
from dflash.errors import UserError
from tests.bench.make import segment


def evidence(slowdown: float, *, noise: float = 0.004, drift: float = 0.0, rounds: int = 10, seed: int = 0) -> Evidence:
    """A made-up gate of three launches."""
    rng = np.random.default_rng(seed)
    launches, taken = [], 0
    for process in range(3):
        segments = []
        for round_, order in zip(range(rounds), pairs(process), strict=False):
            for place, name in enumerate(order):
                slow = (1 / (1 - slowdown) if name == HEAD else 1.0) * (1 + drift * taken)
                segments.append(
                    segment(name, round_, [float(0.1 * slow * np.exp(rng.normal(0, noise)))] * 4, place, process=process)
                )
                taken += 1
        launches.append(Launch(segments=segments))
    return Evidence(launches=launches, cycle=4)


@pytest.mark.parametrize(
    ("hits", "runs", "text"),
    [
        (0, 59, "0 of 59 = 0.0% (0.0 to 6.1)"),
        (57, 60, "57 of 60 = 95.0% (86.1 to 99.0)"),
        (3, 3, "3 of 3 = 100.0% (29.2 to 100.0)"),
        (0, 0, "-"),
    ],
)
def test_shares_come_with_exact_bounds(hits: int, runs: int, text: str) -> None:
    assert share(hits, runs) == text


def trial(percent: float, subject: str = "spin", **changes: Any) -> Trial:
    found = evidence(percent / 100, **changes)
    return Trial(subject, percent, 0.5, 0, "Some CPU, 2 cores", found.cycle, tuple(found.segments))


def test_a_row_counts_verdicts_and_what_others_would_have_said() -> None:
    row, other = Row("spin", 2.0), Row("trainer", 2.0)
    for seed in range(3):
        add([row, other], trial(2.0, seed=seed))
    add([row, other], replace(trial(2.0, seed=3), incomplete=("head died",)))
    assert (row.runs, row.judged, row.found, other.runs) == (4, 3, 3, 0)
    assert row.verdicts == {"over": 3, "invalid": 1}
    assert all(abs(error) < 1.0 for error in row.errors)
    assert row.rivals["pyperf t-test"] == 3


def test_identical_code_is_judged_with_its_times_scaled_too() -> None:
    """As precisely as if head had really lost that share, and only by gates of identical code."""
    rows = make_rows(["spin"])
    for seed in range(5):
        add(rows, trial(0.0, seed=seed))
    add(rows, trial(1.0))
    same, *others = (row for row in rows if row.inject_percent in (0.0, 2.0))
    assert same.verdicts == {"within": 5}
    assert [(row.scaled, row.runs, row.found) for row in others] == [(False, 0, 0), (True, 5, 5)]
    assert others[1].errors == pytest.approx(same.errors, abs=0.02)
    assert [row.runs for row in rows if row.inject_percent == 1.0] == [1, 5]


def test_without_real_slowdowns_all_gates_go_to_identical_code() -> None:
    for nothing in ([], [0.0]):
        assert list(islice(turns(["spin", "trainer"], nothing), 4)) == [("spin", 0.0), ("trainer", 0.0)] * 2


def test_a_list_with_a_0_in_it_is_the_order_itself() -> None:
    assert list(islice(turns(["spin"], [0.0, 2.0, 2.0]), 6)) == [("spin", percent) for percent in (0.0, 2.0, 2.0)] * 2
    assert list(islice(turns(["spin"], [2.0, 1.0]), 5)) == [("spin", percent) for percent in (0.0, 2.0, 0.0, 1.0, 0.0)]
    assert [row.inject_percent for row in make_rows(["spin"], [0.0, 2.0, 2.0]) if not row.scaled] == [0.0, 2.0]


def test_stored_gates_are_judged_again_and_added_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for number, file in enumerate(files):
        trials.append(file, trial(0.0, seed=number))
        trials.append(file, trial(5.0, "trainer", seed=number))
    kept, made = next(trials.read(files[0])).evidence().interval(), evidence(0.0).interval()
    assert kept is not None
    assert made is not None
    assert (kept.low, kept.high, kept.n) == pytest.approx((made.low, made.high, made.n), abs=1e-5)
    assert judge_again(files, str(tmp_path / "out"), Reporter(quiet=True)) == ExitCode.WITHIN
    text = capsys.readouterr().out
    assert "0 of 2 = 0.0%" in text
    assert "2 of 2 = 100.0%" in text


@pytest.mark.fault
@pytest.mark.parametrize(
    ("text", "said"), [("{}\n", "gates.jsonl:1: missing key 'subject'"), ("", "no gate in it"), (None, "No such file")]
)
def test_a_file_that_holds_no_gates_is_one_line(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "gates.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=said):
        judge_again([file], str(tmp_path / "out"), Reporter(quiet=True))


def test_drift_fools_those_who_measure_base_first_and_not_the_rounds() -> None:
    drifting = evidence(0.0, drift=0.001)
    found = drifting.interval()
    assert found is not None
    assert found.low < 0.0 < found.high
    assert rivals.alarms(drifting.segments) == dict.fromkeys(rivals.RIVALS, True)


def test_others_find_a_clear_slowdown_and_nothing_in_quiet_identical_code() -> None:
    assert rivals.alarms(evidence(0.05).segments) == dict.fromkeys(rivals.RIVALS, True)
    assert not any(rivals.alarms(evidence(0.0, noise=1e-4, seed=5).segments).values())


def test_the_base_first_order_takes_each_side_from_its_half() -> None:
    base, head = rivals.base_then_head(evidence(0.0, rounds=4).segments)
    assert len(base) == len(head) == 12


@pytest.mark.fault
@pytest.mark.parametrize(
    ("report", "code"),
    [
        (Report([Row("spin", 0.0)], [], ""), ExitCode.INCOMPLETE),
        (Report([Row("spin", 0.0, runs=2, verdicts={"within": 2})], [], ""), ExitCode.WITHIN),
        (Report([Row("spin", 0.0, runs=2, verdicts={"within": 1, "over": 1})], [], ""), ExitCode.OVER),
        (Report([Row("spin", 0.0, runs=1, verdicts={"invalid": 1})], [], ""), ExitCode.INCOMPLETE),
        (Report([], [PlantFound("item", True, "+4 syncs")], ""), ExitCode.WITHIN),
        (Report([], [PlantFound("item", False, "nothing changed")], ""), ExitCode.OVER),
    ],
)
def test_a_harness_that_was_wrong_or_tried_nothing_is_red(report: Report, code: ExitCode) -> None:
    assert exit_code(report) is code


def test_the_tables_name_subject_question_answer_and_bounds() -> None:
    rows = make_rows(["spin"])
    add(rows, trial(0.0))
    report = Report(rows, [PlantFound("item", True, "+4 syncs")], "Some CPU, 2 cores", 600.0)
    text = to_text(report)
    assert "false alarms (over)" in text
    assert "0 of 1 = 0.0% (0.0 to 97.5)" in text
    assert "1% found" in text
    assert "1%, scaled, found" in text
    assert "+4 syncs" in text
    assert "Some CPU, 2 cores, in 10 min 00 s" in text
    assert to_markdown(report).count("\n## ") == 3
    assert json.loads(to_json(report))["schema"] == "dflash-bench/selfcheck/2"


@pytest.mark.parametrize(
    ("on", "found", "how"),
    [
        (ExactCounts("x", 4, True, 4, 100, 8, None), True, "+4 syncs"),
        (ExactCounts("x", 4, True, 0, 104, 12, None), True, "+4 operations, +4 copies"),
        (ExactCounts("x", 4, True, 0, 100, 8, None), False, "nothing changed"),
        (ExactCounts("x", 4, True, 0, 96, 8, None), False, "-4 operations"),
    ],
)
def test_a_planted_fault_is_found_by_what_it_adds(on: ExactCounts, found: bool, how: str) -> None:
    assert judge_plant("x", ExactCounts("off", 4, True, 0, 100, 8, None), on) == PlantFound("x", found, how)


@pytest.mark.fault
def test_a_timing_run_that_dies_is_a_fault_that_was_missed() -> None:
    found = time_plant("busy_loop", "no/such/config.toml", [])
    assert not found.found
    assert "no receipt (exit code 2)" in found.how
    assert "no/such/config.toml" in found.how


def test_time_goes_to_each_kind_of_gate_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[float] = []
    clock = iter(range(0, 100_000, 10))

    def try_gate(config: Config, subject: str, inject_percent: float, minutes: float, seed: int) -> Trial:
        asked.append(inject_percent)
        return trial(inject_percent, subject, seed=seed)

    monkeypatch.setattr(selfcheck.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(selfcheck, "try_gate", try_gate)
    monkeypatch.setattr(selfcheck, "check_plants", lambda *arguments: [PlantFound("item", True, "+4 syncs")])
    out = tmp_path / "out"
    code = run_selfcheck(
        Config(),
        config_path="x.toml",
        minutes=8,
        subjects=("spin",),
        gate_minutes=0.5,
        out=str(out),
        reporter=Reporter(quiet=True),
        seed=0,
    )
    assert code == ExitCode.WITHIN
    assert len(asked) >= 8
    assert asked[:8] == [0.0, 1.0, 0.0, 2.0, 0.0, 5.0, 0.0, 1.0]
    stored = json.loads((out / "selfcheck.json").read_text())
    assert sum(row["runs"] for row in stored["rows"] if not row["scaled"]) == len(asked)
    assert [kept.inject_percent for kept in trials.read(out / "gates.jsonl")] == asked
    assert "5% found" in capsys.readouterr().out
