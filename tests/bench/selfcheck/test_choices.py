"""What else was tried: each candidate does what its name says."""

from __future__ import annotations

import numpy as np
import pytest

from bench.selfcheck import choices
from bench.selfcheck.pair_runs import made_up


def test_only_the_mean_sees_a_cost_on_few_pairs_in_full() -> None:
    rows = {row[0]: row[1:] for row in choices.centres(made_up(), 200, 0)}
    few = {kind: float(row[2].rstrip("%")) for kind, row in rows.items()}
    assert few["mean"] == pytest.approx(2.0, abs=0.15)
    for kind in choices.CENTRES[1:]:
        assert few[kind] < 1.6
        assert float(rows[kind][1].rstrip("%")) == pytest.approx(2.0, abs=0.3)


def test_centres_by_hand() -> None:
    values = np.array([-1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 101.0])
    assert choices.centre(values, "mean") == pytest.approx(106 / 8)
    assert choices.centre(values, "middle half") == 1.0
    assert choices.centre(values, "winsorised at 2") == pytest.approx((5 + 2 * 1.4826) / 8)


def test_hadamard_is_sharper_for_few_pairs_and_cannot_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert choices.main(["--runs", "40"]) == 0
    out = capsys.readouterr().out
    assert "2^-2" in out
    assert out.count("\n") > 15


@pytest.mark.fault
def test_a_file_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert choices.main(["nowhere.json"]) == 2
    assert capsys.readouterr().err == "error: nowhere.json: holds no pairs; give it receipts of overhead\n"
