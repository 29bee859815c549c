"""The table of error rates: counted and bounded right, and red when the harness was wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench import rivals, selfcheck
from bench.gate import pairs
from bench.gate_verdict import HEAD, Evidence, Launch
from bench.plant_check import PlantFound, judge_plant, time_plant
from bench.progress import Reporter
from bench.records import ExactCounts, ExitCode, Verdict
from bench.selfcheck import INJECTED, Report, Row, add, exit_code, run_selfcheck, share, to_json, to_markdown, to_text
from dflash.config import Config
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


def test_a_row_counts_verdicts_and_what_others_would_have_said() -> None:
    row = Row("spin", 2.0)
    add(row, evidence(0.02), Verdict.OVER)
    add(row, evidence(0.02, seed=1), Verdict.SLOWER)
    add(row, evidence(0.02, seed=2), Verdict.WITHIN)
    add(row, evidence(0.02, seed=3), Verdict.INVALID)
    assert (row.runs, row.judged, row.found) == (4, 3, 2)
    assert all(abs(error) < 1.0 for error in row.errors)
    assert row.rivals["pyperf t-test"] == 3


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
        (Report([Row("spin", 0.0)], [], 1.0), ExitCode.INCOMPLETE),
        (Report([Row("spin", 0.0, 2, {"within": 2})], [], 1.0), ExitCode.WITHIN),
        (Report([Row("spin", 0.0, 2, {"within": 1, "over": 1})], [], 1.0), ExitCode.OVER),
        (Report([Row("spin", 0.0, 1, {"invalid": 1})], [], 1.0), ExitCode.INCOMPLETE),
        (Report([], [PlantFound("item", True, "+4 syncs")], 1.0), ExitCode.WITHIN),
        (Report([], [PlantFound("item", False, "nothing changed")], 1.0), ExitCode.OVER),
    ],
)
def test_a_harness_that_was_wrong_or_tried_nothing_is_red(report: Report, code: ExitCode) -> None:
    assert exit_code(report) is code


def test_the_tables_name_subject_question_answer_and_bounds() -> None:
    row = Row("spin", 0.0)
    add(row, evidence(0.0), Verdict.WITHIN)
    report = Report([row, Row("spin", 1.0)], [PlantFound("item", True, "+4 syncs")], 1.5, 600.0, "Some CPU, 2 cores")
    text = to_text(report)
    assert "false alarms (over)" in text
    assert "0 of 1 = 0.0% (0.0 to 97.5)" in text
    assert "1% found" in text
    assert "+4 syncs" in text
    assert "Some CPU, 2 cores, in 10 min 00 s" in text
    assert to_markdown(report).count("\n## ") == 3
    assert json.loads(to_json(report))["schema"] == "dflash-bench/selfcheck/1"


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

    def try_gate(config: Config, row: Row, minutes: float, seed: int) -> None:
        asked.append(row.inject_percent)
        add(row, evidence(row.inject_percent / 100, seed=seed), Verdict.OVER if row.inject_percent else Verdict.WITHIN)

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
    assert asked[:5] == [*INJECTED, 0.0]
    stored = json.loads((out / "selfcheck.json").read_text())
    assert sum(row["runs"] for row in stored["rows"]) == len(asked)
    assert "5% found" in capsys.readouterr().out
