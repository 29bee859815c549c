"""The control in whole runs of the light subject, on a clock that only moves when told to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from steptime.commands.overhead import Options, run_overhead
from steptime.measure.run import Asked, Measured, measure
from steptime.progress import Reporter
from steptime.records.pairs import CONTROL, Layer, Question
from steptime.records.receipt import Receipt
from steptime.records.types import ExitCode, Verdict
from steptime.statistics.control import fault, known_cost
from steptime.subjects.protocol import Named
from steptime.subjects.spin import Noise
from steptime.subjects.spin_pairs import Cost, SpinPairs
from tests.steptime.make import judged
from tests.steptime.scenes import within

SWITCHES = ("idle", "idler")


def subject(switches: tuple[str, ...] = SWITCHES) -> SpinPairs:
    return SpinPairs(dict.fromkeys(switches, Cost()), noise=Noise(step=0.01, slow=0.01))


def taken(made: SpinPairs, *, control: bool = True, together: bool = False) -> Measured:
    switches = tuple(made.costs)
    asked = Asked(switches, 0.01, 60.0, seed=2, together=together, control=control)
    run = measure(made, asked, Reporter(quiet=True), flushes=1, clock=made.clock_s)
    # Whatever else runs on this machine takes nothing from the simulated clock.
    return replace(run, before=None, after=None)


def test_a_run_finds_its_control_at_what_it_lost() -> None:
    run = taken(subject())
    found = known_cost(run.pairs, SWITCHES)
    assert found is not None
    assert found.percent == pytest.approx(2.0, abs=1e-3), "of the whole step, by construction"
    assert found.estimate.low < 2.0 < found.estimate.high
    assert found.estimate.low > 0
    assert fault(found) == ""


def test_it_touches_nothing_but_path_pairs_for_each() -> None:
    run = taken(subject())
    for pair in run.pairs:
        here = pair.layer is Layer.PATH and pair.question is Question.EACH
        assert abs(pair.sign(CONTROL)) == here
        for half in (pair.first, pair.second):
            assert (half.control_s > 0) == (CONTROL in half.on)
    assert run.result.accounted_percent is not None
    assert CONTROL not in run.result.accounted_percent
    assert run.losses_equal


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "how"),
    [
        (subject(), {"control": False}),
        (subject(), {"together": True}),
        (subject(("idle",)), {}),
    ],
)
def test_runs_without_one(made: SpinPairs, how: dict[str, bool]) -> None:
    run = taken(made, **how)
    assert not any(CONTROL in (*pair.first.on, *pair.second.on) for pair in run.pairs)
    assert known_cost(run.pairs, tuple(made.costs)) is None


def test_a_subject_that_has_none_is_measured_without() -> None:
    made = subject()
    made.controlled = False
    assert not any(pair.sign(CONTROL) for pair in taken(made).pairs)


@pytest.mark.fault
def test_a_control_that_says_that_it_waits_and_does_not_is_found() -> None:
    made = subject()
    made.control._lose = int  # takes no time on the subject's clock, and says that it does
    run = taken(made)
    found = known_cost(run.pairs, SWITCHES)
    assert found is not None
    assert found.percent == pytest.approx(2.0, abs=0.1)
    assert "the control: a known 2.0% was measured as" in fault(found)
    _, judgement = judged(run)
    assert (judgement.verdict, judgement.exit_code) == (Verdict.INVALID, ExitCode.INVALID)


@pytest.mark.fault
def test_a_control_whose_switch_is_dead_is_found() -> None:
    made = subject()
    made.control.pay = lambda worked_ns: None  # type: ignore[method-assign]
    _, judgement = judged(taken(made))
    assert judgement.verdict is Verdict.INVALID
    assert "the control lost 0.00% where 2% was asked of it" in judgement.reasons


@pytest.mark.slow
@pytest.mark.parametrize("quick", [False, True])
def test_a_full_run_has_one_and_a_quick_run_has_none(
    quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = subject()
    monkeypatch.setattr(
        "steptime.commands.overhead.measure",
        lambda *given, **named: replace(
            measure(*given, clock=made.clock_s, **named), before=None, after=None
        ),
    )
    options = Options(Named("spin", "0" * 8), quick=quick, minutes=1.0, out=str(tmp_path), root=tmp_path)
    receipt = run_overhead(options, made, Reporter(quiet=True))
    assert (receipt.control is None) == quick
    for name in ("report.md", "report.html"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert ("a known 2.0% was measured as" in text) == (not quick)
    assert Receipt.read(tmp_path / "receipt.json") == receipt


def test_a_receipt_from_before_the_control_is_read() -> None:
    tree = json.loads(within().to_json())
    del tree["control"]
    for pair in tree["pairs"]:
        for half in ("first", "second"):
            del pair[half]["control_s"]
    old = Receipt.from_json(json.dumps(tree))
    assert old.control is None
    assert {half.control_s for pair in old.pairs for half in (pair.first, pair.second)} == {0.0}
