"""The table of error rates: counted and bounded right, and red when the harness was wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.commands import selfcheck
from bench.commands.selfcheck import COSTS, judge_again, run_selfcheck
from bench.gate.session import pairs
from bench.gate.verdict import HEAD, GateEvidence, Launch
from bench.progress import Reporter
from bench.records.types import ExactCounts, ExitCode
from bench.selfcheck import other_judges, stored_gates
from bench.selfcheck.plant_check import PlantFound, judge_plant, time_plant
from bench.selfcheck.rates import LaunchNoise, RateRow, Report, add, exit_code, make_rows, rows_of, turns
from bench.selfcheck.stored_gates import Trial
from bench.selfcheck.tables import share, to_json, to_markdown, to_text
from bench.statistics.contrasts import Rounds
from dflash.config import Config
from steptime.errors import UserError
from tests.bench.make import segment

GATE_MINUTES = 0.5


def evidence(
    slowdown: float, *, noise: float = 0.004, drift: float = 0.0, rounds: int = 10, seed: int = 0
) -> GateEvidence:
    """A made-up gate of three launches."""
    rng = np.random.default_rng(seed)
    launches, taken = [], 0
    for process in range(3):
        segments = []
        for round_, order in zip(range(rounds), pairs(process), strict=False):
            for place, name in enumerate(order):
                slow = (1 / (1 - slowdown) if name == HEAD else 1.0) * (1 + drift * taken)
                segments.append(
                    segment(
                        name,
                        round_,
                        [float(0.1 * slow * np.exp(rng.normal(0, noise)))] * 4,
                        place,
                        process=process,
                    )
                )
                taken += 1
        launches.append(Launch(segments=segments))
    return GateEvidence(launches=launches, cycle=4)


@pytest.mark.parametrize(
    ("hits", "runs", "text"),
    [
        (0, 59, "0 of 59 (0-6%)"),
        (57, 60, "57 of 60 (86-99%)"),
        (3, 3, "3 of 3 (29-100%)"),
        (0, 0, "-"),
    ],
)
def test_shares_come_with_exact_bounds(hits: int, runs: int, text: str) -> None:
    assert share(hits, runs) == text


def trial(percent: float, subject: str = "spin", **changes: Any) -> Trial:
    found = evidence(percent / 100, **changes)
    return Trial(subject, percent, GATE_MINUTES, 0, "Some CPU, 2 cores", found.cycle, tuple(found.segments))


def test_a_row_counts_verdicts_and_what_others_would_have_said() -> None:
    row, *others = (
        RateRow("spin", GATE_MINUTES, 2.0),
        RateRow("trainer", GATE_MINUTES, 2.0),
        RateRow("spin", 6.0, 2.0),
    )
    report = Report([row, *others])
    for seed in range(3):
        add(report, trial(2.0, seed=seed))
    add(report, replace(trial(2.0, seed=3), incomplete=("head died",)))
    assert (row.runs, row.judged, row.found, *(other.runs for other in others)) == (4, 3, 3, 0, 0)
    assert row.verdicts == {"over": 3, "invalid": 1}
    assert all(abs(error) < 1.0 for error in row.errors)
    assert row.rivals["pyperf t-test"] == 3


@pytest.mark.slow
def test_identical_code_is_judged_with_its_times_scaled_too() -> None:
    """As precisely as if head had really lost that share, and only by gates of identical code."""
    rows = make_rows(["spin"], GATE_MINUTES, COSTS)
    report = Report(rows)
    for seed in range(5):
        add(report, trial(0.0, seed=seed))
    add(report, trial(1.0))
    same, *others = (row for row in rows if row.inject_percent in (0.0, 2.0))
    assert same.verdicts == {"within": 5}
    assert [(row.scaled, row.runs, row.found) for row in others] == [(False, 0, 0), (True, 5, 5)]
    assert others[1].errors == pytest.approx(same.errors, abs=0.02)
    assert [row.runs for row in rows if row.inject_percent == 1.0] == [1, 5]


def test_without_real_slowdowns_all_gates_go_to_identical_code() -> None:
    for nothing in ([], [0.0]):
        assert list(islice(turns(["spin", "trainer"], nothing), 4)) == [("spin", 0.0), ("trainer", 0.0)] * 2


def test_a_list_with_a_0_in_it_is_the_order_itself() -> None:
    assert (
        list(islice(turns(["spin"], [0.0, 2.0, 2.0]), 6))
        == [("spin", percent) for percent in (0.0, 2.0, 2.0)] * 2
    )
    assert list(islice(turns(["spin"], [2.0, 1.0]), 5)) == [
        ("spin", percent) for percent in (0.0, 2.0, 0.0, 1.0, 0.0)
    ]
    rows = make_rows(["spin"], GATE_MINUTES, [0.0, 2.0, 2.0])
    assert [row.inject_percent for row in rows if not row.scaled] == [0.0, 2.0]


@pytest.mark.slow
def test_stored_gates_are_judged_again_and_added_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for number, file in enumerate(files):
        stored_gates.append(file, trial(0.0, seed=number))
        stored_gates.append(file, trial(5.0, "trainer", seed=number))
    kept, made = next(stored_gates.read(files[0])).evidence().interval(), evidence(0.0).interval()
    assert kept is not None
    assert made is not None
    assert (kept.low, kept.high, kept.n) == pytest.approx((made.low, made.high, made.n), abs=1e-5)
    assert judge_again(files, str(tmp_path / "out"), Reporter(quiet=True)) == ExitCode.WITHIN
    text = capsys.readouterr().out
    assert "0 of 2 (0-84%)" in text
    assert "2 of 2 (16-100%)" in text
    assert "trainer    none" not in text
    assert "trainer    1% scaled" not in text


@pytest.mark.fault
@pytest.mark.parametrize(
    ("text", "said"),
    [("{}\n", "gates.jsonl:1: missing key 'subject'"), ("", "no gate in it"), (None, "No such file")],
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
    assert other_judges.alarms(drifting.segments) == dict.fromkeys(other_judges.RIVALS, True)


def test_others_find_a_clear_slowdown_and_nothing_in_quiet_identical_code() -> None:
    assert other_judges.alarms(evidence(0.05).segments) == dict.fromkeys(other_judges.RIVALS, True)
    assert not any(other_judges.alarms(evidence(0.0, noise=1e-4, seed=5).segments).values())


def test_the_base_first_order_takes_each_side_from_its_half() -> None:
    base, head = other_judges.base_then_head(evidence(0.0, rounds=4).segments)
    assert len(base) == len(head) == 12


@pytest.mark.fault
@pytest.mark.parametrize(
    ("report", "code"),
    [
        (
            Report([RateRow("spin", GATE_MINUTES, 0.0)], untried=["no gate of spin was measured and judged"]),
            ExitCode.INCOMPLETE,
        ),
        (Report([RateRow("spin", GATE_MINUTES, 0.0, runs=2, verdicts={"within": 2})]), ExitCode.WITHIN),
        (
            Report(
                [RateRow("spin", GATE_MINUTES, 0.0, runs=2, verdicts={"within": 2})], untried=["interrupted"]
            ),
            ExitCode.INCOMPLETE,
        ),
        (
            Report([RateRow("spin", GATE_MINUTES, 0.0, runs=2, verdicts={"within": 1, "over": 1})]),
            ExitCode.OVER,
        ),
        (
            Report(
                [RateRow("spin", GATE_MINUTES, 0.0, runs=2, verdicts={"over": 1})], untried=["interrupted"]
            ),
            ExitCode.OVER,
        ),
        (
            Report([RateRow("spin", GATE_MINUTES, 2.0, runs=2, verdicts={"within": 1, "over": 1})]),
            ExitCode.OVER,
        ),
        (
            Report([RateRow("spin", GATE_MINUTES, 1.0, runs=2, verdicts={"within": 1, "slower": 1})]),
            ExitCode.WITHIN,
        ),
        (Report([RateRow("spin", GATE_MINUTES, 5.0, runs=1, verdicts={"slower": 1})]), ExitCode.WITHIN),
        (Report([], [PlantFound("item", True, "+4 syncs")]), ExitCode.WITHIN),
        (
            Report([], [PlantFound("item", True, "+4 syncs"), PlantFound("busy_loop", None, "no time")]),
            ExitCode.INCOMPLETE,
        ),
        (Report([], [PlantFound("item", False, "nothing changed")]), ExitCode.OVER),
    ],
)
def test_a_harness_that_was_wrong_or_tried_nothing_is_red(report: Report, code: ExitCode) -> None:
    assert exit_code(report) is code


def test_the_tables_name_subject_question_answer_and_bounds() -> None:
    report = Report(
        make_rows(["spin"], GATE_MINUTES, COSTS), [PlantFound("item", True, "+4 syncs")], seconds=600.0
    )
    add(report, replace(trial(0.0), commit="abc"))
    text = to_text(report)
    lines = text.splitlines()
    assert next(line for line in lines if line.startswith("spin       none")).split() == [
        *("spin", "none", "0.5", "0", "of", "1", "(0-98%)"),
        *(f"{report.rows[0].widths[0]:.2f}%", f"{report.rows[0].errors[0]:+.2f}%", "1", "within"),
    ]
    assert any(line.startswith("spin       1% real") for line in lines)
    assert any(line.startswith("spin       1% scaled") for line in lines)
    assert "+4 syncs" in text
    assert "Some CPU, 2 cores; 10 min 00 s; commit abc" in text
    assert max(map(len, lines)) <= 80
    assert to_markdown(report).count("\n## ") == 4
    assert json.loads(to_json(report))["schema"] == "dflash-bench/selfcheck/3"


@pytest.mark.slow
def test_gates_of_unlike_lengths_are_not_added_up() -> None:
    stored = [trial(0.0), replace(trial(0.0, seed=1), minutes=6.0), replace(trial(2.0, seed=2), minutes=6.0)]
    rows = rows_of(stored)
    assert [(row.minutes, row.inject_percent) for row in rows if not row.scaled] == [
        (0.5, 0.0),
        (6.0, 0.0),
        (6.0, 2.0),
    ]
    report = Report(rows)
    for one in stored:
        add(report, one)
    assert [(noise.minutes, noise.gates) for noise in report.noise] == [(0.5, 1), (6.0, 2)]
    assert [row.runs for row in rows] == [1] * len(rows)
    assert not [row for row in rows_of([trial(1.0)]) if row.scaled], "nothing to scale without identical code"


@pytest.mark.parametrize(("launch_percent", "low", "high"), [(0.0, 0.6, 1.6), (2.0, 4.0, 16.0)])
def test_the_noise_of_launches_is_told_from_that_of_rounds(
    launch_percent: float, low: float, high: float
) -> None:
    """1 where launches add none; 1 + (2%)^2 / (4%^2 / 30 rounds) = 8.5 where each is off by 2%."""
    rng, noise = np.random.default_rng(3), LaunchNoise("spin", 1.0)
    for _ in range(20):
        process = np.repeat(np.arange(5), 30)
        plain = 0.3 + rng.normal(0, 0.01 * launch_percent, 5)[process] + rng.normal(0, 0.04, len(process))
        noise.add(Rounds(process, plain, np.empty(0), np.empty(0)))
    assert noise.round_percent == pytest.approx(4.0, rel=0.05)
    assert noise.launch_ratio is not None
    assert low < noise.launch_ratio < high
    assert (noise.gates, noise.rounds, noise.launches, noise.between_df) == (20, 3000, 100, 80)


def test_one_launch_of_one_round_says_nothing_of_the_noise() -> None:
    noise = LaunchNoise("spin", 1.0)
    noise.add(Rounds(np.zeros(1, np.int64), np.zeros(1), np.empty(0), np.empty(0)))
    assert (noise.launches, noise.round_percent, noise.launch_ratio) == (0, None, None)


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


@pytest.mark.slow
@pytest.mark.fault
def test_a_timing_run_that_dies_is_a_fault_that_was_missed() -> None:
    found = time_plant("busy_loop", "no/such/config.toml", [])
    assert not found.found
    assert "no receipt (exit code 2)" in found.how
    assert "no/such/config.toml" in found.how


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[float]]:
    """Runs a self-check of made-up gates by a clock that jumps; what was injected in each."""
    clock = iter(range(0, 100_000, 10))
    monkeypatch.setattr(selfcheck.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(selfcheck, "check_plants", lambda *arguments: [PlantFound("item", True, "+4 syncs")])

    def run(
        code: ExitCode = ExitCode.WITHIN, broken: str = "", interrupted_at: int = -1, **changes: Any
    ) -> list[float]:
        asked: list[float] = []

        def try_gate(config: Config, subject: str, inject_percent: float, minutes: float, seed: int) -> Trial:
            if len(asked) == interrupted_at:
                raise KeyboardInterrupt
            asked.append(inject_percent)
            made = replace(trial(inject_percent, subject, seed=seed, rounds=4), minutes=minutes)
            return replace(made, incomplete=("head died",)) if subject == broken else made

        monkeypatch.setattr(selfcheck, "try_gate", try_gate)
        settings: dict[str, Any] = {
            "minutes": 8,
            "subjects": ("spin",),
            "gate_minutes": GATE_MINUTES,
            "seed": 0,
        } | changes
        out = str(tmp_path / "out")
        assert (
            run_selfcheck(Config(), config_path="x.toml", out=out, reporter=Reporter(quiet=True), **settings)
            == code
        )
        return asked

    return run


@pytest.mark.slow
def test_time_goes_to_each_kind_of_gate_in_turn(
    check: Callable[..., list[float]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    asked = check()
    assert len(asked) >= 8
    assert asked[:8] == [0.0, 1.0, 0.0, 2.0, 0.0, 5.0, 0.0, 1.0]
    stored = json.loads((tmp_path / "out" / "selfcheck.json").read_text())
    assert sum(row["runs"] for row in stored["rows"] if not row["scaled"]) == len(asked)
    assert [kept.inject_percent for kept in stored_gates.read(tmp_path / "out" / "gates.jsonl")] == asked
    assert "5% real" in capsys.readouterr().out
    assert (tmp_path / "summary.md").read_text().startswith("# Self-check of the harness")


@pytest.mark.slow
@pytest.mark.fault
def test_what_was_found_wrong_is_in_the_job_summary_too(
    check: Callable[..., list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A red step runs nothing after its command."""
    monkeypatch.setattr(
        selfcheck, "check_plants", lambda *arguments: [PlantFound("item", False, "nothing changed")]
    )
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    check(ExitCode.OVER)
    assert re.search(r"\| item +\| NO ", (tmp_path / "summary.md").read_text())


@pytest.mark.slow
def test_a_second_check_into_the_same_folder_goes_on_from_there(
    check: Callable[..., list[float]], tmp_path: Path
) -> None:
    first, second = check(plants=False), check(injected=[0.0], gate_minutes=1.0, plants=False)
    stored = json.loads((tmp_path / "out" / "selfcheck.json").read_text())
    assert sum(row["runs"] for row in stored["rows"] if not row["scaled"]) == len(first) + len(second)
    assert [
        kept.inject_percent for kept in stored_gates.read(tmp_path / "out" / "gates.jsonl")
    ] == first + second
    assert stored["seconds"] > 60 * GATE_MINUTES * len(first)


@pytest.mark.slow
@pytest.mark.fault
def test_gates_of_an_earlier_check_do_not_excuse_one_that_measured_nothing(
    check: Callable[..., list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(plants=False)
    assert check(ExitCode.INCOMPLETE, minutes=0.1, plants=False) == []
    assert "INCOMPLETE: no gate of spin was measured and judged" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.fault
def test_one_subject_whose_gates_all_fail_is_not_hidden_by_another(
    check: Callable[..., list[float]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check(ExitCode.INCOMPLETE, subjects=("spin", "trainer"), broken="trainer")
    assert "INCOMPLETE: no gate of trainer was measured and judged" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.fault
def test_an_interrupted_check_is_not_green(
    check: Callable[..., list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(check(ExitCode.INCOMPLETE, interrupted_at=3)) == 3
    shown = capsys.readouterr().out
    assert "INCOMPLETE: interrupted" in shown
    assert "0 of 2" in shown


@pytest.mark.fault
def test_planted_faults_for_which_no_time_is_left_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.selfcheck import plant_check
    from bench.syncs.faults.planted import COUNTED, PLANTED

    monkeypatch.setattr(
        plant_check, "count_plants", lambda config, names: [PlantFound(name, True, "+1") for name in names]
    )
    monkeypatch.setattr(plant_check, "time_plant", lambda *arguments: pytest.fail("there was no time"))
    found = plant_check.check_plants(Config(), "x.toml", [], -1.0, Reporter(quiet=True))
    assert {plant.name for plant in found if plant.found is None} == set(PLANTED) - set(COUNTED)
    assert len(found) == len(PLANTED)
    assert "untried" in to_text(Report([], found))
