"""The whole way on simulated clocks: plan, segments, statistics, verdict; and every way in which a run must
not be green."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from bench.measure.plan import make_arms
from bench.measure.runner import MeasuredRun, measure
from bench.progress import Reporter
from bench.records.types import ALL, ExactCounts, ExitCode, Verdict
from bench.statistics.analysis import analyse
from bench.statistics.stopping import MIN_ROUNDS, StoppingRule, judged
from bench.statistics.verdict import judge
from bench.subjects.protocol import INJECTED
from bench.subjects.spin import Noise, SpinSubject
from steptime.errors import UserError

QUIET = Noise(step=0.004, slow=0.004)


def run(
    subject: SpinSubject,
    *,
    minutes: float = 2.0,
    marginal: bool = True,
    seed: int = 0,
    reporter: Reporter | None = None,
) -> MeasuredRun:
    arms = make_arms(subject.collectors, marginal=marginal)
    contrasts = judged(arms, subject.collectors)
    limits = {name: 1.0 if name == ALL else 0.5 for name in contrasts}
    return measure(
        subject,
        arms,
        subject.collectors,
        seed=seed,
        time_s=60.0 * minutes,
        rule=StoppingRule(contrasts, limits, subject.cycle),
        reporter=reporter or Reporter(quiet=True),
        clock=subject.clock_s,
    )


def verdict_of(found: MeasuredRun, **changes: object):  # type: ignore[no-untyped-def]
    return judge(analyse(replace(found.measurement, **changes)), counts_required=False)  # type: ignore[arg-type]


@pytest.mark.slow
def test_identical_arms_are_within_and_every_segment_is_kept() -> None:
    found = run(SpinSubject({"a": 0.0, "b": 0.0}, noise=QUIET))
    judgement = verdict_of(found)
    assert (judgement.verdict, judgement.exit_code) == (Verdict.WITHIN, ExitCode.WITHIN)
    assert found.sizing is not None
    assert found.measurement.rounds >= MIN_ROUNDS
    assert len(found.measurement.segments) == found.measurement.rounds * found.sizing.segments_per_round
    assert {len(segment.step_seconds) for segment in found.measurement.segments} == {found.sizing.steps}
    assert found.difference == ""


@pytest.mark.slow
def test_a_known_cost_is_blamed_on_the_one_that_carries_it() -> None:
    found = run(SpinSubject({"a": 0.0, INJECTED: 0.02}, noise=QUIET))
    judgement = verdict_of(found)
    assert judgement.exit_code is ExitCode.OVER
    costs = {cost.name: cost for cost in judgement.collectors}
    assert costs[INJECTED].verdict is Verdict.OVER
    assert costs["a"].verdict is Verdict.WITHIN
    assert costs[INJECTED].isolated is not None
    assert costs[INJECTED].isolated.low < 2.0 < costs[INJECTED].isolated.high
    assert judgement.all is not None
    assert judgement.all.verdict is Verdict.OVER


def test_measuring_ends_when_it_is_clear_long_before_the_time_is_up() -> None:
    found = run(SpinSubject({"a": 0.0}, noise=Noise(step=0.0005, slow=0.0005)), minutes=60)
    assert found.measurement.stopped == "clear"
    assert found.measurement.rounds == MIN_ROUNDS


@pytest.mark.slow
def test_measuring_ends_with_the_time_when_it_never_gets_clear() -> None:
    subject = SpinSubject({"a": 0.0, "b": 0.0}, noise=Noise(step=0.2, slow=0.05))
    found = run(subject, minutes=2)
    assert found.measurement.stopped == "time"
    assert 60.0 < subject.clock_s() < 150.0
    assert verdict_of(found).exit_code is ExitCode.UNRESOLVED


def test_a_crashed_arm_leaves_its_fault_and_is_incomplete(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(SpinSubject({"a": 0.0, "b": 0.0}, noise=QUIET, crash_in="only:b"))
    assert "planted crash in arm only:b" in found.measurement.faults[0]
    assert "Traceback" in capsys.readouterr().err
    judgement = verdict_of(found)
    assert (judgement.verdict, judgement.exit_code) == (Verdict.INVALID, ExitCode.INCOMPLETE)
    assert "planted crash" in judgement.reasons[0]


def test_a_crash_before_the_first_segment_is_incomplete_too() -> None:
    found = run(SpinSubject({"a": 0.0}, noise=QUIET, crash_in="off"))
    assert "before the first segment" in found.measurement.faults[0]
    assert verdict_of(found).exit_code is ExitCode.INCOMPLETE


class Interrupting(Reporter):
    """Presses Ctrl-C before the segment `at`."""

    def __init__(self, at: int) -> None:
        super().__init__(quiet=True)
        self.left = at

    def advance(self, what: str, share: float, left_s: float) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


@pytest.mark.fault
def test_an_interrupted_run_keeps_what_was_measured_and_is_incomplete(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = run(SpinSubject({"a": 0.0, "b": 0.0}, noise=QUIET), reporter=Interrupting(at=20))
    assert len(found.measurement.segments) == 20
    assert found.measurement.stopped == "interrupted"
    judgement = verdict_of(found)
    assert (judgement.verdict, judgement.exit_code) == (Verdict.INVALID, ExitCode.INCOMPLETE)
    assert judgement.reasons[0] == "interrupted after 20 segments"
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_collector_that_changes_training_is_invalid_with_arm_and_step() -> None:
    found = run(SpinSubject({"a": 0.0, "b": 0.0}, noise=QUIET, corrupt="b"))
    assert "of the cycle" in found.difference
    assert any(f"arm {arm}" in found.difference for arm in ("only:b", "all", "without:a"))
    judgement = verdict_of(found)
    assert (judgement.verdict, judgement.exit_code) == (Verdict.INVALID, ExitCode.INVALID)


@pytest.mark.slow
def test_a_deselected_arm_is_incomplete() -> None:
    found = run(SpinSubject({"a": 0.0, "b": 0.0}, noise=QUIET))
    kept = tuple(segment for segment in found.measurement.segments if segment.arm != "only:a")
    judgement = verdict_of(found, segments=kept)
    assert judgement.exit_code is ExitCode.INCOMPLETE
    assert any("'only:a' was not measured" in reason for reason in judgement.reasons)


def test_no_segment_at_all_is_incomplete() -> None:
    found = run(SpinSubject({"a": 0.0}, noise=QUIET))
    assert verdict_of(found, segments=()).exit_code is ExitCode.INCOMPLETE


def test_a_counter_that_was_not_armed_is_invalid() -> None:
    found = run(SpinSubject({"a": 0.0}, noise=QUIET))
    counts = {
        arm.name: ExactCounts(arm.name, 4, armed=False, unavailable=("no trace hooks",))
        for arm in found.measurement.arms
    }
    judgement = verdict_of(found, counts=counts)
    assert judgement.exit_code is ExitCode.INVALID
    assert any("no trace hooks" in reason for reason in judgement.reasons)


def test_an_empty_plan_is_a_mistake_of_the_user() -> None:
    with pytest.raises(UserError, match="empty"):
        run(SpinSubject({}, noise=QUIET))


def test_bad_input_found_while_building_is_raised_and_the_subject_closed() -> None:
    class Broken(SpinSubject):
        closed = False

        def open(self) -> None:
            raise UserError("no such file")

        def close(self) -> None:
            Broken.closed = True

    with pytest.raises(UserError, match="no such file"):
        run(Broken({"a": 0.0}, noise=QUIET))
    assert Broken.closed


def test_what_must_not_run_beside_a_measurement_is_waited_for() -> None:
    subject = SpinSubject({"a": 0.0}, noise=QUIET)
    order: list[str] = []
    inner = subject.run
    subject.run = lambda *arguments: order.append("run") or inner(*arguments)  # type: ignore[method-assign, func-returns-value]
    arms = make_arms(subject.collectors)
    contrasts = judged(arms, subject.collectors)
    measure(
        subject,
        arms,
        subject.collectors,
        seed=0,
        time_s=60.0,
        rule=StoppingRule(contrasts, dict.fromkeys(contrasts, 1.0), subject.cycle),
        reporter=Reporter(quiet=True),
        ready=lambda: order.append("ready"),
        clock=subject.clock_s,
    )
    assert order == ["ready", "run"]


def test_progress_off_a_terminal_is_plain_lines() -> None:
    stream = io.StringIO()
    reporter = Reporter(stream)
    reporter.say("plan: 3 arms")
    reporter.begin("measuring")
    reporter.advance("measuring: round 1 of at most 8, off", 0.25, 65.0)
    reporter.advance("measuring: round 1 of at most 8, all", 0.3, 60.0)  # too soon after the last line
    reporter.end()
    assert stream.getvalue().splitlines() == [
        "plan: 3 arms",
        "measuring: round 1 of at most 8, off:  25%, at most 1 min 05 s to go",
    ]
