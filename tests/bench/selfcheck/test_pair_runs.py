"""Made-up runs: their noise is what it says, costs fall where they should, and the table counts what was
said."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from bench.selfcheck import pair_runs
from bench.selfcheck.pair_runs import Cost, Session, Tally, made_up, run_of, stored_halves, stretches
from steptime.records.pairs import Layer
from steptime.records.types import ExitCode, log_ratio
from tests.steptime.statistics.pairs import autoregressive, pairs_of

QUIET = made_up(spread=0.01, stalls=0.0)
SESSION = Session(1.0)


def test_a_free_run_in_little_noise_is_within_and_a_dear_collector_is_named() -> None:
    assert run_of(QUIET, SESSION, {}, 0).exit_code is ExitCode.WITHIN
    found = run_of(QUIET, SESSION, {"grads": Cost(log_ratio(3.0))}, 0)
    assert found.exit_code is ExitCode.OVER
    assert found.all is not None
    assert found.all.estimate is not None
    assert found.all.estimate.percent == pytest.approx(3.0, abs=0.3)
    named = [cost.name for cost in found.collectors if cost.verdict.value in ("over", "slower")]
    assert named == ["grads"]


@pytest.mark.parametrize("layer", list(Layer))
def test_a_cost_falls_into_its_layer(layer: Layer) -> None:
    found = run_of(QUIET, SESSION, {"grads": Cost(0.05, layer)}, 1).collectors[1].estimate
    assert found is not None
    expected = {Layer.PATH: (4.88, 0, 0), Layer.TICK: (0, 50, 0), Layer.FLUSH: (0, 0, 500)}[layer]
    costs = (found.layers.path_percent, found.layers.tick_ms, found.layers.flush_ms)
    assert costs == pytest.approx(expected, abs=0.8)


def test_a_cost_on_few_halves_is_the_same_on_average() -> None:
    found = run_of(QUIET, Session(4.0), {"grads": Cost(0.02, one_in=20)}, 2).all
    assert found is not None
    assert found.estimate is not None
    assert found.estimate.percent == pytest.approx(2.0, abs=2.5 * found.estimate.standard_error)
    assert found.estimate.standard_error > 0.2  # forty percent at times is noise of its own


def test_noise_of_stored_pairs_keeps_its_spread_and_its_neighbours(tmp_path: Path) -> None:
    series = autoregressive(np.random.default_rng(0), 4000, 0.9, 0.1)
    pairs = pairs_of(("a", "b"), series, {}, 0)
    file = tmp_path / "receipt.json"
    file.write_text(json.dumps({"schema": "x", "pairs": [asdict(pair) for pair in pairs]}))
    noise = stretches(stored_halves([file]))
    drawn = noise(np.random.default_rng(1), Layer.PATH, 2000)
    assert drawn.shape == (2000, 2)
    assert drawn.std() == pytest.approx(0.1, rel=0.15)
    differences = drawn[:, 0] - drawn[:, 1]
    assert differences.std() == pytest.approx(0.1 * (2 * 0.1) ** 0.5, rel=0.1)
    sums = drawn.sum(axis=1)
    assert np.corrcoef(sums[1:], sums[:-1])[0, 1] > 0.6
    assert noise(np.random.default_rng(1), Layer.TICK, 10).shape == (10, 2)  # the path's, as none is stored


@pytest.mark.fault
@pytest.mark.parametrize("text", ["{}", "not json", '{"pairs": [1]}', '{"pairs": []}'])
def test_a_file_without_pairs_is_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "receipt.json"
    file.write_text(text)
    assert pair_runs.main([str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_the_table_counts_alarms_and_says_how_sure_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    tally = Tally()
    costs = {"grads": Cost(log_ratio(3.0))}
    for seed in range(4):
        tally.add(run_of(QUIET, SESSION, costs, seed), costs)
    assert (tally.runs, tally.alarms, tally.found, tally.blamed, tally.within) == (4, 4, 4, 4, 0)
    assert tally.row(["1", "3%", "path"])[5] == "100.0% (39.8 to 100.0)"
    assert pair_runs.main(["--minutes", "1", "--runs", "2", "--rows", "1"]) == 0
    assert "| 1         | 0%" in capsys.readouterr().out


def test_made_up_gates_take_the_launch_for_their_unit(capsys: pytest.CaptureFixture[str]) -> None:
    found = pair_runs.gate_of(QUIET, 8, 40, log_ratio(2.0), 0)
    assert found.exit_code is ExitCode.OVER
    assert pair_runs.gate_of(QUIET, 8, 40, 0.0, 0).exit_code is ExitCode.WITHIN
    # Launches that lie 5% apart leave 2% open, however quiet their pairs.
    assert pair_runs.gate_of(QUIET, 8, 40, log_ratio(2.0), 0, between=0.05).exit_code is ExitCode.UNRESOLVED
    assert pair_runs.main(["--gate", "7", "10", "--runs", "3"]) == 0
    assert "7 x 10" in capsys.readouterr().out
