"""The history of a run: bounded, exact over its legs, and the summary is made of it."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config import Config
from dflash.pipeline import history, summary
from dflash.pipeline.history import CURVE, END, START, History
from dflash.pipeline.scalars_log import StepScalars
from dflash.pipeline.trainer import TrainResult


def row(step: int, loss: float = 2.0, norm: float = 1.0) -> StepScalars:
    return StepScalars(step, loss, 1.5, (0.5, math.nan, 0.1), norm, 10, (step,))


def through_json(made: History) -> History:
    return History.from_dict(json.loads(json.dumps(made.as_dict(), allow_nan=False)))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 3 * CURVE), st.integers(0, 50))
def test_a_history_that_travelled_in_a_checkpoint_goes_on_as_if_it_had_not(steps, at):
    whole, parted = History(), History()
    for step in range(steps):
        if step == at:
            parted = through_json(parted)
        whole.add(row(step, float(step)))
        parted.add(row(step, float(step)))
    assert parted.as_dict() == whole.as_dict()


def test_it_never_grows_with_the_run_and_its_curve_covers_it():
    made = History()
    for step in range(5 * CURVE):
        made.add(row(step, float(step)))
    assert made.steps == 5 * CURVE
    assert len(made.first) == START
    assert len(made.last) == END
    assert CURVE // 2 <= len(made.curve) <= CURVE
    assert sum(point.loss for point in made.curve) / len(made.curve) == pytest.approx(
        (5 * CURVE - 1) / 2, rel=0.2
    )
    assert made.curve[-1].step >= 5 * CURVE - made.stride


def test_a_mean_leaves_out_what_is_not_there():
    point = history.mean(
        [history.Point(0, 1.0, 1.0, (math.nan, 0.5), 1.0), history.Point(1, 3.0, 2.0, (0.5, 0.5), 1.0)]
    )
    assert (point.step, point.loss, point.slots) == (1, 2.0, (0.5, 0.5))


def result(made: History, finished: bool = True) -> TrainResult:
    return TrainResult(history=made, finished=finished)


def test_the_summary_is_that_of_the_whole_run(tmp_path):
    made = History()
    for step in range(30):
        made.add(row(step, 3.0 - step / 30))
    made.legs, made.seconds, made.tokens, made.stalled_seconds = 3, 30.0, 2000, 20.0
    figures = summary.as_dict(Config(), result(made))
    assert figures["steps"] == 30
    assert figures["tokens_per_second"] == 200.0  # the time in which nothing ran is no running time
    text = summary.text(Config(), result(made), tmp_path)
    assert "finished after 30 steps in 3 legs, 30.0 s (stood still for 20 s), 200 tok/s" in text
    assert "nothing was learnt" not in text


@pytest.mark.fault
@pytest.mark.parametrize(("norm", "word"), [(0.0, "no gradient left"), (1.0, "train.lr = 0.0006")])
def test_a_run_that_learnt_nothing_says_so_in_one_line(tmp_path, norm, word):
    made = History()
    for step in range(40):
        made.add(row(step, math.log(64), norm))
    text = summary.text(Config(), result(made), tmp_path)
    lines = [line for line in text.splitlines() if "nothing was" in line]
    assert len(lines) == 1
    assert word in lines[0]
    assert "began at 4.159 and ends at 4.159" in lines[0]
