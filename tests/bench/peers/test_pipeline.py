"""The pipeline beside its stages: the shares, and that each worker does its share of the same batches."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from bench.peers import pipeline
from bench.peers.pipeline import Boundaries, Round, Stages, Subject, Work, measure, pace, report
from tests.pipeline.run import small_config

TWO = ('target.devices=["cpu", "cpu:1"]', 'drafter.devices=["cpu:2", "cpu:3"]', "train.accumulation=2")


def a_round(rate: float) -> Round:
    return Round((Stages(300.0, 120.0), Stages(300.0, 80.0)), (95.0, 85.0), rate)


def test_a_pipeline_is_held_to_the_slower_stage_of_the_rounds_beside_it():
    one = a_round(81.0)
    assert one.of_alone == pytest.approx(0.81)
    assert one.of_beside == pytest.approx(0.9)
    assert one.beside_of_alone == pytest.approx(0.9)


def test_the_report_says_whether_the_goal_is_reached_by_the_median_round():
    missed = report([a_round(81.0), a_round(80.0), a_round(99.0)])
    assert "81.0% (80.5 to 90.0%), goal 95% missed" in missed
    assert "90.0% (90.0 to 90.0%): the machine and the interpreter lock" in missed
    assert "goal 95% reached" in report([a_round(96.0)])


def test_a_pass_of_the_pipeline_is_the_median_behind_the_first():
    hooks = Boundaries()
    hooks.seconds = [0.0, 9.0, 10.0, 11.0, 12.0, 13.0, 20.0, 21.0]  # two steps a pass; the first one fills
    assert hooks.pass_s(2) == pytest.approx(2.0)


def test_workers_make_their_passes_together_and_an_error_is_raised():
    calls, met = [0, 0], threading.Barrier(2)

    def work(which: int) -> None:
        met.wait()  # passes only where both are at work at the same time
        calls[which] += 1

    assert pace([lambda: work(0), lambda: work(1)], passes=3) > 0.0
    assert calls == [3, 3]

    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pace([broken, lambda: None], passes=2)


def test_each_worker_does_its_share_and_the_weights_stay(tmp_path: Path):
    subject = Subject(small_config(tmp_path, *TWO), steps=2, passes=1)
    trainer, _ = subject.trainer(tmp_path)
    before = trainer.replicas[1].flat.working.clone()
    work = Work(trainer, 2)
    specs = [trainer.plan.spec(index) for index in range(2 * 2 * 2)]
    assert work.tokens == sum(trainer._collator(spec).tokens for spec in specs)
    assert (len(work.targets), len(work.drafters)) == (2, 2)
    assert min(work.alone(1).slower, work.beside(1)) > 0.0
    assert trainer.replicas[1].flat.working.equal(before)
    trainer.observer.close()


@pytest.mark.slow
def test_rounds_have_stages_on_both_sides_of_a_pipeline_that_trained(tmp_path: Path):
    (one,) = Subject(small_config(tmp_path), steps=2, passes=1).rounds(1)
    assert one.alone[0] != one.alone[1]
    assert one.pipeline > 0.0


def test_nonsense_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert pipeline.main(["--config", str(tmp_path / "none.toml")]) == 2
    assert "none.toml" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        measure(["--rounds", "0"])
