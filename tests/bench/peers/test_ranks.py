"""Two ranks beside one process: the ratios, and a short real run."""

from __future__ import annotations

import pytest

from bench.peers.ranks import Round, Runs, table
from steptime.errors import UserError
from tests.pipeline.run import SMALL, write_ids


def test_the_ratios_and_their_table():
    one = Round(alone=100.0, apart=180.0, ranks=171.0)
    assert (one.of_twice, one.of_apart) == (0.855, 0.95)
    text = table([one, Round(100.0, 180.0, 162.0), Round(100.0, 180.0, 180.0)])
    assert "85.5%" in text
    assert "95.0%" in text


@pytest.mark.thorough
def test_a_round_of_real_runs(tmp_path):
    ids = write_ids(tmp_path / "ids.jsonl")
    settings = (*SMALL, f"data.path={ids}", f"data.cache={tmp_path / 'cache'}")
    runs = Runs(None, settings, 4, tmp_path / "runs")
    found = runs.round()
    assert min(found.alone, found.apart, found.ranks) > 0.0


@pytest.mark.fault
def test_a_run_that_fails_and_a_single_core_are_told(tmp_path, monkeypatch):
    runs = Runs(None, ("train.lr=-1",), 4, tmp_path)
    with pytest.raises(UserError, match=r"a run ended with exit code 2: .*train.lr"):
        runs.round()
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3})
    with pytest.raises(UserError, match="two ranks need two cores"):
        Runs(None, (), 4, tmp_path)
