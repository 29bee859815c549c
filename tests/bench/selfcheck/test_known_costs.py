"""Known costs beside what was found of them: on made-up pairs, on the simulated light subject, as rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.selfcheck import known_costs, known_rows
from bench.selfcheck.known_rows import Found, KnownRow
from steptime.measure.run import Asked, Measured
from steptime.progress import Reporter
from steptime.records.pairs import PLACEBO, Layer, Pair
from steptime.subjects.injection import Injection, Place
from steptime.subjects.protocol import INJECTED
from tests.bench.selfcheck.test_selfcheck import simulated
from tests.steptime.statistics.pairs import LENGTHS, SECONDS_PER, pairs_of


def known(truth: dict[str, float], *, seed: int = 3) -> list[Found]:
    """Rows of made-up pairs in which each switch costs `truth` of the time in every layer named by its
    place."""
    switches = (INJECTED, "injected@tick", "idle")
    layers = {INJECTED: Layer.PATH, "injected@tick": Layer.TICK, "idle": Layer.PATH}
    pairs: list[Pair] = []
    for place, layer in enumerate(LENGTHS):
        own = {name: truth[name] for name in switches if layers[name] is layer}
        noise = 0.002 * np.random.default_rng(seed + place).normal(size=400)
        pairs += pairs_of(switches, noise, own, seed + place, layers=(layer,))
    injections = (Injection(2.0), Injection(2.0, Place.TICK))
    return known_costs.compare(pairs, switches, SECONDS_PER, injections)


def test_known_costs_are_found_under_their_own_names() -> None:
    rows = known({INJECTED: 0.0202, "injected@tick": 0.02, "idle": 0.0})
    assert [one.name for one in rows] == [INJECTED, "injected@tick", "idle", PLACEBO]
    assert all(one.right for one in rows)
    assert [one.truth for one in rows] == [2.0, 2.0, 0.0, 0.0]
    text = known_rows.table(kept(rows))
    assert "WRONG" not in text
    assert "unseen" not in text
    assert "2%, ticks" in text
    assert "2 of 2 intervals (90%) of known costs hold the truth" in text


def kept(rows: list[Found], **changes: Any) -> list[known_rows.KnownRow]:
    fixed = KnownRow("spin", "2%", 0, 3.0, "2026-12-01T00:00:00Z", "0123", "CPU X", (), rows[0])
    return [replace(fixed, found=one, **changes) for one in rows]


@pytest.mark.fault
@pytest.mark.parametrize(
    ("truth", "wrong"),
    [
        ({INJECTED: 0.0, "injected@tick": 0.02, "idle": 0.0}, INJECTED),
        ({INJECTED: 0.0202, "injected@tick": 0.03, "idle": 0.0}, "injected@tick"),
        ({INJECTED: 0.0202, "injected@tick": 0.02, "idle": 0.01}, "idle"),
    ],
)
def test_a_known_cost_that_is_missed_or_laid_on_another_is_wrong(truth: dict[str, float], wrong: str) -> None:
    rows = known(truth)
    assert [one.name for one in rows if not one.right] == [wrong]
    assert known_rows.table(kept(rows)).count("WRONG") == 1


@pytest.mark.fault
def test_what_was_not_measured_is_not_right() -> None:
    rows = known_costs.compare([], ("idle",), SECONDS_PER, ())
    assert [one.right for one in rows] == [False, False]


def test_a_cost_known_to_lie_in_a_range_is_right_inside_it_and_one_that_must_show_is_not_nothing() -> None:
    estimate = known({INJECTED: 0.0202, "injected@tick": 0.02, "idle": 0.0})[0].estimate
    assert estimate is not None
    inside = Found("injected@target", Layer.PATH, 5.0, 5.0, estimate, 2.0, 0.0)
    assert inside.off_by == 0.0
    assert inside.right
    assert inside.truth_in_words == "0 to 5%, path"
    assert not replace(inside, truth_percent=1.0).right
    nothing = replace(estimate, percent=0.0, low=-0.5, high=0.5)
    assert replace(inside, estimate=nothing).right
    assert not replace(inside, estimate=nothing, least_percent=1.0).right
    unseen = replace(inside, estimate=replace(nothing, high=1.5), least_percent=1.0)
    assert "unseen" in known_rows.table(kept([unseen]))


def test_plants_stand_at_their_tick() -> None:
    busy, held = (case.plant for case in known_costs.CASES if case.plant is not None)
    pairs = pairs_of(
        (busy.name, "idle"),
        0.002 * np.random.default_rng(5).normal(size=800),
        {busy.name: 0.3},
        1,
        layers=tuple(Layer),
    )
    rows = known_costs.compare(pairs, (busy.name, "idle"), SECONDS_PER, plant=busy)
    assert [row.name for row in rows] == [busy.name, "idle", PLACEBO]
    assert rows[0].truth_in_words == "1 to 50%, ticks"
    assert held.least_percent is None
    rows = known_costs.compare([], (held.name,), SECONDS_PER, plant=held)
    assert rows[0].truth == pytest.approx(10.0)


def test_rows_are_added_up_and_a_check_goes_on_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    seeds: list[tuple[str, int]] = []

    def run(make: Any, case: known_costs.Case, minutes: float, seed: int, reporter: Reporter) -> Any:
        seeds.append((case.name, seed))
        made = make(case.injections, "")
        return known({INJECTED: 0.0202, "injected@tick": 0.02, "idle": 0.0}), measured_nothing(made)

    monkeypatch.setattr(known_costs, "run_case", run)
    words = ["--rows", str(file), "--cases", "1%,5%"]
    moments = iter(f"2026-12-01T00:00:0{second}Z" for second in range(9))
    monkeypatch.setattr(known_costs.run_files, "now_utc", lambda: next(moments))
    assert known_costs.main(words) == 0
    assert known_costs.main([*words, "--runs", "2"]) == 0
    assert seeds == [("1%", 0), ("5%", 0), ("1%", 1), ("5%", 1)]
    rows = known_rows.read(file)
    assert len(rows) == 4 * 4
    assert known_rows.runs_of(rows, "spin", "1%") == 2
    assert "8 of 8 intervals (90%) of known costs hold the truth" in capsys.readouterr().out


def measured_nothing(made: Any) -> Measured:
    return Measured("spin", Asked((), 1.0, 1.0), (), {}, minutes=1.0)


@pytest.mark.fault
def test_bad_words_and_files_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"subject": "spin"}\n')
    assert known_costs.main(["--rows", str(file)]) == 2
    assert f"{file}:1:" in capsys.readouterr().err
    assert known_costs.main(["--cases", "2"]) == 2
    assert "no such case" in capsys.readouterr().err
    assert [case.name for case in known_costs.cases_of("spin")] == ["1%", "2%", "5%", "late"]
    assert len(known_costs.cases_of("trainer")) == len(known_costs.CASES)


@pytest.mark.fault
def test_a_run_that_crashes_or_is_too_short_leaves_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    whole = measured_nothing(None)
    few = known_costs.compare([], ("idle",), SECONDS_PER)
    for found, run in (([], replace(whole, faults=("spin crashed",))), (few, whole)):
        monkeypatch.setattr(known_costs, "run_case", lambda *given, both=(found, run): both)
        assert known_costs.main(["--rows", str(file), "--cases", "1%"]) == 1
    told = capsys.readouterr().out
    assert "1%: spin crashed" in told
    assert "1%: too few pairs in these minutes for idle, placebo" in told
    assert known_rows.read(file) == []


@pytest.mark.slow
def test_the_light_subject_loses_what_it_is_told_to_lose() -> None:
    places: set[Place] = set()
    for case in known_costs.cases_of("spin"):
        rows, run = known_costs.run_case(
            lambda injections, plant: simulated(tuple(injections)), case, 3.0, 0, Reporter(quiet=True)
        )
        assert run.faults == ()
        assert [one.name for one in rows if not one.right] == []
        places |= {one.place for one in case.injections}
    assert len(places) == len(Place) - 1, "every place but the targets"
