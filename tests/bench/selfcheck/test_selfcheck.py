"""The table of error rates: counted and bounded right, and red when the harness was wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.commands import selfcheck
from bench.commands.selfcheck import COSTS, judge_again, run_selfcheck
from bench.selfcheck import other_judges, rates, taking, trials
from bench.selfcheck.plant_check import PlantFound, judge_plant, time_plant
from bench.selfcheck.rates import RateRow, Report, add, exit_code, make_rows, rows_of, too_often, turns
from bench.selfcheck.tables import share, to_json, to_markdown, to_text
from bench.selfcheck.trials import Command, Trial
from dflash.config import Config
from steptime.errors import UserError
from steptime.gate.verdict import HEAD
from steptime.progress import Reporter
from steptime.records.pairs import Layer, Pair, Question
from steptime.records.types import ExactCounts, ExitCode, Verdict
from steptime.statistics.design import Draw
from steptime.subjects.injection import Injection
from steptime.subjects.spin import Noise
from steptime.subjects.spin_pairs import Cost, SpinPairs, cost_of
from tests.steptime.statistics.pairs import pair_of, pairs_of

MINUTES = 0.5
GATE, OVERHEAD = Command.GATE, Command.OVERHEAD
PATH = {Layer.PATH: 1.0}
INJECTED = "injected"


def gate(percent: float = 0.0, subject: str = "spin", *, seed: int = 0, drift: float = 0.0) -> Trial:
    """A made-up gate of eight launches of twelve pairs."""
    rng = np.random.default_rng(seed)
    head, pairs, cost = frozenset({HEAD}), list[Pair](), {HEAD: -float(np.log1p(-percent / 100))}
    for number in range(96):
        first = head if rng.random() < 0.5 else frozenset()
        draw = Draw(Layer.PATH, Question.EACH, first, head - first)
        noise = rng.normal(0, 0.004, 2) + drift * (2 * number + np.arange(2))
        pairs.append(pair_of(draw, number, noise, cost, process=number // 12))
    return made(GATE, subject, percent, seed, pairs, (HEAD,))


def overhead(percent: float = 0.0, subject: str = "spin", *, seed: int = 0, noise: float = 0.01) -> Trial:
    """A made-up run of 200 pairs of the path."""
    extra = {INJECTED: -float(np.log1p(-percent / 100))} if percent else {}
    switches = ("idle", "idler", *extra)
    halves = noise * np.random.default_rng(seed).normal(size=400)
    return made(OVERHEAD, subject, percent, seed, pairs_of(switches, halves, extra, seed), switches)


def made(
    command: Command, subject: str, percent: float, seed: int, pairs: list[Pair], switches: tuple[str, ...]
) -> Trial:
    same = tuple(replace(pair, losses_equal=True) for pair in pairs)
    inject = f"{percent:g}@step" if percent else ""
    machine = "Some CPU, 2 cores"
    return Trial(command, subject, inject, MINUTES, seed, machine, "abc", same, PATH, switches, MINUTES)


@pytest.mark.parametrize(
    ("hits", "runs", "text"),
    [(0, 59, "0 of 59 (0-6%)"), (57, 60, "57 of 60 (86-99%)"), (3, 3, "3 of 3 (29-100%)"), (0, 0, "-")],
)
def test_shares_come_with_exact_bounds(hits: int, runs: int, text: str) -> None:
    assert share(hits, runs) == text


@pytest.mark.parametrize("trial", [gate, overhead])
def test_a_row_counts_what_was_said_and_only_of_its_own_kind(trial: Callable[..., Trial]) -> None:
    command = trial().command
    row, *others = (
        RateRow(command, "spin", MINUTES, "2@step"),
        RateRow(command, "trainer", MINUTES, "2@step"),
        RateRow(command, "spin", 6.0, "2@step"),
        RateRow(OVERHEAD if command is GATE else GATE, "spin", MINUTES, "2@step"),
    )
    report = Report([row, *others])
    for seed in range(3):
        assert add(report, trial(2.0, seed=seed))
    assert not add(report, replace(trial(2.0, seed=3), incomplete=("it died",)))
    assert (row.runs, row.judged, row.found, *(other.runs for other in others)) == (4, 3, 3, 0, 0, 0)
    assert row.verdicts == {"over": 3, "invalid": 1}
    assert row.held >= 2
    assert row.unblamed == 0, "the injected one is blamed, no other"
    assert all(abs(error) < 1.0 for error in row.errors)
    assert row.rivals.get("pyperf t-test") == (3 if command is GATE else None)


@pytest.mark.parametrize("trial", [gate, overhead])
def test_runs_without_a_cost_are_judged_with_times_scaled_too(trial: Callable[..., Trial]) -> None:
    """As precisely as if it had really lost that share, and only those without a cost."""
    rows = make_rows(trial().command, "spin", MINUTES, COSTS)
    report = Report(rows)
    for seed in range(3):
        add(report, trial(seed=seed))
    add(report, trial(1.0))
    same, *others = (row for row in rows if row.inject in ("", "2@step"))
    assert same.found == 0
    assert [(row.scaled, row.runs, row.found) for row in others] == [(False, 0, 0), (True, 3, 3)]
    assert others[1].errors == pytest.approx(same.errors, abs=0.05)
    assert others[1].unblamed == 0
    assert [row.runs for row in rows if row.inject == "1@step"] == [1, 3]


def test_a_cost_of_ticks_is_told_by_its_own_layer() -> None:
    """20 ms of each second come on top of it: 1.98% of the throughput."""
    assert trials.true_percent("2@tick") == pytest.approx(1.980, abs=0.001)
    assert (trials.true_percent("2@step"), trials.true_percent("")) == (2.0, 0.0)
    assert replace(overhead(), inject="2@tick").dear == "injected@tick"
    assert (overhead(2.0).dear, overhead().dear, gate(2.0).dear) == (INJECTED, "idle", HEAD)


def test_without_real_costs_all_runs_go_to_nothing() -> None:
    for nothing in ([], [""]):
        found = turns([GATE, OVERHEAD], ["spin"], nothing)
        assert list(islice(found, 4)) == [(GATE, "spin", ""), (OVERHEAD, "spin", "")] * 2


def test_a_list_with_a_0_in_it_is_the_order_itself() -> None:
    asked = selfcheck.to_injects("0,2,2@tick")
    assert asked == ("", "2@step", "2@tick")
    assert [cost for _, _, cost in islice(turns([GATE], ["spin"], asked), 6)] == [*asked, *asked]
    alternating = turns([GATE], ["spin"], ["2@step", "1@step"])
    assert [cost for _, _, cost in islice(alternating, 5)] == ["", "2@step", "", "1@step", ""]
    rows = make_rows(GATE, "spin", MINUTES, asked)
    assert [row.inject for row in rows if not row.scaled] == ["", "2@tick", "2@step"]


def test_stored_runs_are_judged_again_and_added_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for number, file in enumerate(files):
        trials.append(file, gate(seed=number))
        trials.append(file, overhead(5.0, "trainer", seed=number))
    kept, _ = trials.read(files[0])
    again, first = kept.judge().all, gate(seed=0).judge().all
    assert again is not None
    assert again.estimate is not None
    assert first is not None
    assert first.estimate is not None
    assert (again.estimate.low, again.estimate.high, again.estimate.n) == pytest.approx(
        (first.estimate.low, first.estimate.high, first.estimate.n), abs=1e-5
    )
    assert judge_again(files, str(tmp_path / "out")) == ExitCode.WITHIN
    text = capsys.readouterr().out
    assert "0 of 2 (0-84%)" in text
    assert "2 of 2 (16-100%)" in text
    assert "trainer    none" not in text
    assert "trainer    1% scaled" not in text


@pytest.mark.fault
@pytest.mark.parametrize(
    ("text", "said"),
    [("{}\n", "trials.jsonl:1: missing key 'command'"), ("", "no run in it"), (None, "No such file")],
)
def test_a_file_that_holds_no_runs_is_one_line(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "trials.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=said):
        judge_again([file], str(tmp_path / "out"))


# -- the others' judges --------------------------------------------------------------------------------------


def test_point_comparison_is_pytest_benchmarks_own() -> None:
    from pytest_benchmark.utils import parse_compare_fail

    check = parse_compare_fail("mean:2%")
    rng = np.random.default_rng(0)
    for _ in range(50):
        base, head = rng.normal(1.0, 0.01, 20), rng.normal(1.02, 0.01, 20)
        fails = bool(check.fails({"mean": head.mean()}, {"mean": base.mean()}))
        assert other_judges.RIVALS["pytest-benchmark mean:2%"](base, head) == fails


@pytest.mark.parametrize("name", list(other_judges.RIVALS))
def test_judges_know_which_way_is_slower(name: str) -> None:
    base = np.random.default_rng(1).normal(1.0, 0.005, 20)
    judge = other_judges.RIVALS[name]
    assert (judge(base, base * 1.05), judge(base, base * 0.95), judge(base, base)) == (True, False, False)


def test_drift_fools_those_who_measure_base_first_and_not_the_pairs() -> None:
    drifting = gate(drift=0.0005)
    said = drifting.judge()
    assert said.verdict is Verdict.WITHIN
    assert other_judges.alarms(drifting.pairs, HEAD) == dict.fromkeys(other_judges.RIVALS, True)
    assert not any(other_judges.alarms(gate(seed=5).pairs, HEAD).values())
    base, head = other_judges.base_then_head(drifting.pairs, HEAD)
    assert len(base) == len(head) == 48


# -- what is wrong is red ------------------------------------------------------------------------------------


def row(inject: str = "", command: Command = GATE, **verdicts: int) -> RateRow:
    return RateRow(command, "spin", MINUTES, inject, runs=sum(verdicts.values()), verdicts=verdicts)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("report", "code"),
    [
        (Report([row()], untried=["no gate of spin was measured and judged"]), ExitCode.INCOMPLETE),
        (Report([row(within=2)]), ExitCode.WITHIN),
        (Report([row(within=2)], untried=["interrupted"]), ExitCode.INCOMPLETE),
        (Report([row(within=1, over=1)]), ExitCode.OVER),
        (Report([row(command=OVERHEAD, within=1, over=1)]), ExitCode.OVER),
        (Report([row(within=99, over=1)]), ExitCode.WITHIN),
        (Report([row(within=97, over=3)]), ExitCode.WITHIN),
        (Report([row(within=96, over=4)]), ExitCode.OVER),
        (Report([row(within=99), row(command=OVERHEAD, within=1, over=1)]), ExitCode.OVER),
        (Report([row(within=1, over=1)], untried=["interrupted"]), ExitCode.OVER),
        (Report([row("2@step", within=1, over=1)]), ExitCode.OVER),
        (Report([row("2@tick", OVERHEAD, within=1, over=1)]), ExitCode.OVER),
        (Report([row("1@step", within=1, slower=1)]), ExitCode.WITHIN),
        (Report([row("5@step", slower=1)]), ExitCode.WITHIN),
        (Report([], [PlantFound("item", True, "+4 syncs")]), ExitCode.WITHIN),
        (
            Report([], [PlantFound("item", True, "+4 syncs"), PlantFound("busy_loop", None, "no time")]),
            ExitCode.INCOMPLETE,
        ),
        (Report([], [PlantFound("item", False, "nothing changed")]), ExitCode.OVER),
    ],
)
def test_a_harness_that_was_wrong_or_tried_nothing_is_red(report: Report, code: ExitCode) -> None:
    assert exit_code(report) == code


def test_one_alarm_in_a_hundred_is_what_a_right_harness_gives() -> None:
    most = {hits: max(n for n in range(hits, 200) if too_often(hits, n)) for hits in (1, 2, 3)}
    assert most == {1: 5, 2: 35, 3: 82}
    assert not too_often(0, 10)


def test_the_report_says_it_all() -> None:
    report = Report(
        [*make_rows(GATE, "spin", MINUTES, COSTS), *make_rows(OVERHEAD, "spin", MINUTES, ["2@thread"])],
        [PlantFound("item", True, "+4 syncs")],
        seconds=600.0,
    )
    add(report, gate())
    add(report, overhead())
    text = to_text(report)
    lines = text.splitlines()
    assert next(line for line in lines if line.startswith("spin       none")).split() == [
        *("spin", "none", "0.5", "0", "of", "1", "(0-98%)"),
        *(f"{report.rows[0].widths[0]:.2f}%", f"{report.rows[0].errors[0]:+.2f}%", "1", "within"),
    ]
    assert any(line.startswith("spin       1% scaled") for line in lines)
    assert any(line.startswith("spin       2% thread") for line in lines)
    assert "Some CPU, 2 cores; 10 min 00 s; commit abc" in text
    assert max(map(len, lines)) <= 80
    assert to_markdown(report).count("\n## ") == 5
    assert json.loads(to_json(report))["schema"] == "dflash-bench/selfcheck/4"


def test_runs_of_unlike_lengths_are_not_added_up() -> None:
    stored = [gate(), replace(gate(seed=1), minutes=6.0), replace(gate(2.0, seed=2), minutes=6.0)]
    rows = rows_of(stored)
    assert [(one.minutes, one.inject) for one in rows if not one.scaled] == [
        (0.5, ""),
        (6.0, ""),
        (6.0, "2@step"),
    ]
    report = Report(rows)
    for one in stored:
        add(report, one)
    assert [one.runs for one in rows] == [1] * len(rows)
    assert not [one for one in rows_of([gate(1.0)]) if one.scaled], "nothing to scale"


# -- planted faults ------------------------------------------------------------------------------------------


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


# -- a whole check -------------------------------------------------------------------------------------------


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, str]]]:
    """Runs a self-check of made-up runs by a clock that jumps; what was asked of each turn."""
    clock = iter(range(0, 100_000, 10))
    monkeypatch.setattr(selfcheck.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(rates, "SCALED", (2.0,))
    monkeypatch.setattr(selfcheck, "check_plants", lambda *arguments: [PlantFound("item", True, "+4 syncs")])

    def run(
        code: ExitCode = ExitCode.WITHIN, broken: str = "", interrupted_at: int = -1, **changes: Any
    ) -> list[tuple[str, str]]:
        asked: list[tuple[str, str]] = []

        def take(
            command: Command, subject: str, config: Config, inject: str, minutes: float, seed: int, _: float
        ) -> Iterator[Trial]:
            if len(asked) == interrupted_at:
                raise KeyboardInterrupt
            asked.append((command.value, inject))
            percent = trials.true_percent(inject)
            # A session gives two runs, a gate is one.
            for number in range(2 if command is OVERHEAD else 1):
                one = (gate if command is GATE else overhead)(percent, subject, seed=seed + number)
                one = replace(one, minutes=minutes)
                yield replace(one, incomplete=("it died",)) if subject == broken else one

        monkeypatch.setattr(selfcheck, "take", take)
        settings: dict[str, Any] = {
            "minutes": 8,
            "subjects": ("spin",),
            "run_minutes": {GATE: MINUTES, OVERHEAD: MINUTES},
            "reporter": Reporter(quiet=True),
            "plants": False,
        } | changes
        out = str(tmp_path / "out")
        assert run_selfcheck(Config(), config_path="x.toml", out=out, **settings) == code
        return asked

    return run


@pytest.mark.slow
def test_time_goes_to_each_kind_of_run_in_turn(
    check: Callable[..., list[tuple[str, str]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    asked = check(minutes=4, plants=True)
    assert len(asked) >= 4
    assert asked[:4] == [("gate", ""), ("overhead", ""), ("gate", "1@step"), ("overhead", "1@step")]
    stored = json.loads((tmp_path / "out" / "selfcheck.json").read_text())
    kept = list(trials.read(tmp_path / "out" / "trials.jsonl"))
    assert sum(one["runs"] for one in stored["rows"] if not one["scaled"]) == len(kept)
    runs = [one for one in asked for _ in range(2 if one[0] == "overhead" else 1)]
    assert [(one.command.value, one.inject) for one in kept] == runs
    assert "planted fault" in capsys.readouterr().out
    assert (tmp_path / "summary.md").read_text().startswith("# Self-check of the harness")


@pytest.mark.fault
def test_what_was_found_wrong_is_in_the_job_summary_too(
    check: Callable[..., list[tuple[str, str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A red step runs nothing after its command."""
    monkeypatch.setattr(
        selfcheck, "check_plants", lambda *arguments: [PlantFound("item", False, "nothing changed")]
    )
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    check(ExitCode.OVER, plants=True, minutes=2, run_minutes={GATE: MINUTES})
    assert re.search(r"\| item +\| NO ", (tmp_path / "summary.md").read_text())


@pytest.mark.slow
def test_a_second_check_goes_on_from_there_and_earlier_runs_excuse_none_that_measured_nothing(
    check: Callable[..., list[tuple[str, str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = {"injected": [""], "minutes": 2}
    first = check(run_minutes={GATE: MINUTES}, **only)
    second = check(run_minutes={GATE: 1.0}, **only)
    kept = list(trials.read(tmp_path / "out" / "trials.jsonl"))
    assert len(kept) == len(first) + len(second)
    assert {one.minutes for one in kept} == {MINUTES, 1.0}
    assert check(ExitCode.INCOMPLETE, minutes=0.1) == []
    assert "INCOMPLETE: no gate of spin was measured and judged" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.fault
def test_one_subject_whose_runs_all_fail_is_not_hidden_by_another(
    check: Callable[..., list[tuple[str, str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    check(ExitCode.INCOMPLETE, subjects=("spin", "trainer"), broken="trainer", injected=[""], minutes=4)
    shown = capsys.readouterr().out
    assert "INCOMPLETE: no gate of trainer was measured and judged" in shown
    assert "INCOMPLETE: no run of overhead of trainer was measured and judged" in shown


@pytest.mark.fault
def test_an_interrupted_check_is_not_green(
    check: Callable[..., list[tuple[str, str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(check(ExitCode.INCOMPLETE, interrupted_at=3, injected=[""])) == 3
    shown = capsys.readouterr().out
    assert "INCOMPLETE: interrupted" in shown
    assert "0 of 2" in shown


# -- sessions, on the simulated light subject ----------------------------------------------------------------


def simulated(injections: tuple[Injection, ...] = (), **changes: Any) -> SpinPairs:
    costs = {"idle": Cost()} | {one.name: cost_of(one) for one in injections}
    return SpinPairs(costs, noise=Noise(), **changes)


def session(made: SpinPairs, monkeypatch: pytest.MonkeyPatch, session_s: float) -> list[Trial]:
    real = taking.measure
    monkeypatch.setattr(taking, "measure", lambda *given, **named: real(*given, clock=made.clock_s, **named))
    return list(taking.take_overhead(made, "spin", "", 0.5, 0, session_s))


@pytest.mark.slow
def test_one_session_gives_many_whole_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ended by the rule that ends a run of its own, none with a pair of another."""
    # Whatever else runs on this machine takes nothing from the simulated clock.
    runs = [replace(run, before=None, after=None) for run in session(simulated(), monkeypatch, 60.0)]
    assert len(runs) >= 3
    numbers = [pair.number for run in runs for pair in run.pairs]
    assert numbers == list(range(len(numbers)))
    assert all(0 < run.minutes_taken <= 0.75 for run in runs)
    assert {run.judge().verdict for run in runs} == {Verdict.WITHIN}, runs[0].judge().reasons
    assert {run.switches for run in runs} == {("idle",)}


@pytest.mark.fault
def test_a_session_that_crashes_leaves_no_run_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, last = session(simulated(crash_with="idle"), monkeypatch, 60.0)
    assert "planted crash" in last.incomplete[0]
    assert last.judge().exit_code is ExitCode.INCOMPLETE
