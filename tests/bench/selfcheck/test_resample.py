"""Made-up gates from stored ones: the noise is theirs, the truth is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.gate.verdict import HEAD
from bench.selfcheck import resample, stored_gates
from bench.selfcheck.resample import COSTS, draw, main, pool_of, theta
from bench.selfcheck.simulate import Cost
from tests.bench.selfcheck.test_selfcheck import trial


def test_the_pool_holds_the_noise_and_not_the_cost() -> None:
    stored = [trial(percent, noise=0.02, seed=seed) for seed, percent in enumerate((0.0, 2.0, 5.0))]
    pool = pool_of(stored)
    assert len(pool.launches) == 9
    assert all(abs(launch.mean()) < 1e-12 for launch in pool.launches)
    spread = np.concatenate(pool.launches).std()
    assert spread == pytest.approx(0.02, rel=0.3), "two segments of each side in a round"


def test_launches_that_lie_apart_stay_apart() -> None:
    def apart(one: stored_gates.Trial) -> stored_gates.Trial:
        slow = [1.0, 1.1, 0.9]
        segments = [
            replace(s, seconds=s.seconds * slow[s.process], step_seconds=())
            if s.arm == HEAD
            else replace(s, step_seconds=())
            for s in one.segments
        ]
        return replace(one, segments=tuple(segments))

    assert pool_of([apart(trial(0.0, seed=seed)) for seed in range(3)]).between == pytest.approx(0.1, rel=0.1)
    assert pool_of([trial(0.0, seed=seed) for seed in range(3)]).between < 0.01


@pytest.mark.parametrize("cost", COSTS)
def test_a_made_up_gate_has_the_cost_that_was_asked_for(cost: Cost) -> None:
    pool = pool_of([trial(0.0, noise=0.01)])
    rounds = draw(pool, cost, 50, 40.0, np.random.default_rng(1))
    assert len(rounds) == 50 * 400
    assert rounds.plain.mean() == pytest.approx(theta(cost), abs=0.003)


def test_the_table_says_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gates.jsonl"
    for seed in range(2):
        stored_gates.append(file, trial(0.0, seed=seed))
        stored_gates.append(file, trial(0.0, "trainer", noise=0.5, seed=seed))
    assert main([str(file), "--runs", "40", "--launches", "4", "--subject", "spin"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("6 launches of 10 rounds on average")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| 4")]
    assert len(rows) == len(COSTS)
    by_cost = {row[1]: dict(zip(resample.HEADERS, row, strict=True)) for row in rows}
    assert by_cost["0.00%"]["over"].startswith("0.0%")
    assert by_cost["2.00%"]["L > 0"].startswith("100.0%")


@pytest.mark.fault
def test_no_gates_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gates.jsonl"
    stored_gates.append(file, trial(0.0))
    assert main([str(file), "--subject", "trainer"]) == 2
    assert capsys.readouterr().err == "error: no launch of at least 8 rounds in these gates\n"
    assert main([str(tmp_path / "absent")]) == 2
    assert "No such file" in capsys.readouterr().err
