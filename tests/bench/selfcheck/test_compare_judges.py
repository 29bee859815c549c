"""The comparison of judges: each judge is the one it claims to be, and all see the same data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.records.types import Commit, ConfigRef, Machine
from bench.selfcheck import compare_judges
from bench.selfcheck.compare_judges import OURS, OURS_OVER, OURS_WITHIN, main, recorded, simulated, tally
from bench.selfcheck.other_judges import RIVALS
from bench.selfcheck.simulate import NOISES
from steptime.errors import UserError
from tests.bench.make import made_receipt

RUNS = 150


def test_point_comparison_is_pytest_benchmarks_own() -> None:
    from pytest_benchmark.utils import parse_compare_fail

    check = parse_compare_fail("mean:2%")
    rng = np.random.default_rng(0)
    for _ in range(50):
        base, head = rng.normal(1.0, 0.01, 20), rng.normal(1.02, 0.01, 20)
        fails = bool(check.fails({"mean": head.mean()}, {"mean": base.mean()}))
        assert RIVALS["pytest-benchmark mean:2%"](base, head) == fails


@pytest.mark.parametrize("name", list(RIVALS))
def test_judges_know_which_way_is_slower(name: str) -> None:
    base = np.random.default_rng(1).normal(1.0, 0.005, 20)
    assert RIVALS[name](base, base * 1.05)
    assert not RIVALS[name](base, base * 0.95)
    assert not RIVALS[name](base, base)


@pytest.mark.slow
def test_drift_fools_base_then_head_and_not_pairs() -> None:
    drifting = next(n for n in NOISES if n.name == "drift 10%")
    traces, base = simulated(drifting, RUNS, seed=0)
    found = tally("drift", traces, base, 0.0, seed=0)
    assert found.hits["Mann-Whitney"] > 0.4 * RUNS
    assert found.hits["pyperf t-test"] > 0.4 * RUNS
    assert found.hits[OURS_OVER] <= 0.03 * RUNS
    assert found.hits[OURS] <= 0.12 * RUNS


@pytest.mark.slow
def test_two_percent_is_missed_by_the_others_and_found_here() -> None:
    shared = next(n for n in NOISES if n.name == "shared machine")
    traces, base = simulated(shared, RUNS, seed=0)
    found = tally("shared", traces, base, 2.0, seed=0)
    assert found.hits[OURS] >= 0.97 * RUNS
    assert found.hits[OURS_WITHIN] == 0
    assert found.hits["pytest-benchmark mean:2%"] < 0.8 * RUNS


def receipt_file(tmp_path: Path) -> Path:
    path = tmp_path / "receipt.json"
    path.write_text(
        made_receipt(Machine("m", "cpu", 2), ConfigRef("c", "h"), Commit("a"), noise=0.01).to_json()
    )
    return path


def test_recorded_segments_serve_as_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = receipt_file(tmp_path)
    assert main([str(path), "--pairs", "4"]) == 0
    out = capsys.readouterr().out
    assert "paired spread" in out
    assert out.count(str(path)) == 1 + len(compare_judges.SLOWDOWNS)


def test_too_few_recorded_segments_are_refused(tmp_path: Path) -> None:
    from bench.records.receipt import Receipt

    with pytest.raises(UserError, match="80 of one length are needed"):
        recorded(Receipt.read(receipt_file(tmp_path)), 40)


@pytest.mark.slow
def test_simulated_table_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--runs", "3", "--pairs", "8"]) == 0
    assert "| shared machine" in capsys.readouterr().out
