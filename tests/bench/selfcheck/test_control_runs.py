"""Made-up runs with a control: one that works is let through, one that does nothing is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.selfcheck import control_runs
from bench.selfcheck.pair_runs import Session, made_up
from steptime.statistics.control import fault

QUIET = made_up(spread=0.02, stalls=0.0)


def test_a_control_that_works_is_found_at_its_size() -> None:
    found = [control_runs.control_of(QUIET, Session(2.0), 1.0, seed) for seed in range(20)]
    assert sum(bool(fault(one)) for one in found) == 0
    assert sum(one.estimate.percent for one in found) / 20 == pytest.approx(2.0, abs=0.1)
    assert all(one.percent == pytest.approx(2.0) for one in found)


@pytest.mark.fault
def test_a_control_that_loses_nothing_is_refused_in_every_quiet_run() -> None:
    found = [control_runs.control_of(QUIET, Session(2.0), 0.0, seed) for seed in range(20)]
    assert all(fault(one) for one in found)


def test_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert control_runs.main(["--minutes", "1", "--runs", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(control_runs.SHARES)
    (tmp_path / "no.json").write_text("{}")
    assert control_runs.main([str(tmp_path / "no.json")]) == 2
    assert "holds no pairs" in capsys.readouterr().err
