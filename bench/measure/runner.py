"""MeasuredRun the plan on a subject and keep every segment."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from bench.machine import state
from bench.machine.gpu_watch import GpuWatch
from bench.machine.sentinel import Sentinel, run_sentinel
from bench.measure.plan import MIN_SEGMENT_S, Sizing, one_round, rounds, size
from bench.progress import Reporter, human_time
from bench.records.types import OFF, Arm, Measurement, Segment
from bench.statistics.intervals import throughput
from bench.statistics.stopping import MIN_ROUNDS, StoppingRule
from bench.subjects.losses import check_losses
from bench.subjects.protocol import SegmentRequest, Subject, SubjectResult, Taken

PILOT_CYCLES = 3
LEAST_S = 15.0
"""Measuring gets so much time at least, however long building took."""
OVERTIME = 1.5
"""Measuring ends in the middle of a round when it has taken this many times what it was given."""
INTERRUPTED = "interrupted"


@dataclass(slots=True)
class Runner:
    """Hands out one request after the other, keeps what comes back, and stops when the answer is clear or the
    time is up.

    Called from the subject's own thread between two segments, never while one runs.
    """

    subject: Subject
    arms: tuple[Arm, ...]
    seed: int
    time_s: float
    rule: StoppingRule
    reporter: Reporter
    min_segment_s: float = MIN_SEGMENT_S
    clock: Callable[[], float] = time.monotonic
    taken: list[Taken] = field(default_factory=list)
    pilot: Taken | None = None
    sizing: Sizing | None = None
    rounds_done: int = 0
    stopped: str = ""
    gpus: GpuWatch = field(init=False)

    def __post_init__(self) -> None:
        self.gpus = GpuWatch(self.subject.devices)

    def on_segment(self, item: Taken) -> None:
        if self.sizing is None:
            self.pilot = item
        else:
            self.taken.append(item)

    def requests(self) -> Iterator[SegmentRequest]:
        """The pilot (some cycles of `off`, which size the rest), then rounds until it is enough."""
        off = self.arms[0]
        yield SegmentRequest(
            off, round=-1, order=0, steps=PILOT_CYCLES * self.subject.cycle, washout=self.subject.washout
        )
        pilot = self.pilot
        assert pilot is not None
        started = self.clock()
        sizing = self.sizing = size(
            step_s=typical_step(pilot.segment, self.subject.cycle),
            cycle=self.subject.cycle,
            segments_per_round=len(one_round(self.arms)),
            time_s=self.time_s,
            washout=self.subject.washout,
            min_segment_s=self.min_segment_s,
        )
        self.reporter.say("plan: " + sizing.describe(len(self.arms)))
        self.reporter.begin("measuring")
        try:
            yield from self._rounds(sizing, started)
        finally:
            self.reporter.end()

    def _rounds(self, sizing: Sizing, started: float) -> Iterator[SegmentRequest]:
        for number, order in enumerate(rounds(self.arms, self.seed)):
            for place, arm in enumerate(order):
                elapsed = self.clock() - started
                if elapsed > OVERTIME * max(self.time_s, sizing.min_time_s):
                    self.stopped = f"time ran out in round {number + 1}"
                    return
                self._show(sizing, number, place, arm, elapsed)
                yield SegmentRequest(arm, number, place, sizing.steps, sizing.washout)
            self.rounds_done = number + 1
            self.gpus.look(now=number == 0)
            self.stopped = self._enough(sizing, self.clock() - started)
            if self.stopped:
                return

    def _enough(self, sizing: Sizing, elapsed: float) -> str:
        self.rule.add([item.segment for item in self.taken[-sizing.segments_per_round :]])
        another = elapsed / self.rounds_done
        decision = self.rule.decide(out_of_time=elapsed + another > self.time_s)
        return decision.why if decision.stop else ""

    def _show(self, sizing: Sizing, number: int, place: int, arm: Arm, elapsed: float) -> None:
        done = (number * sizing.segments_per_round + place) / (MIN_ROUNDS * sizing.segments_per_round)
        # The time is the limit, unless the least number of rounds takes longer, at the pace so far.
        needed = elapsed / done - elapsed if done > 0.02 else sizing.min_time_s
        left = max(self.time_s - elapsed, needed if done < 1.0 else 0.0, 0.0)
        self.reporter.advance(
            f"measuring: round {number + 1}, {arm.name}", elapsed / max(elapsed + left, 1e-9), left
        )


def typical_step(segment: Segment, cycle: int) -> float:
    """Seconds of a step: the median over the passes of the cycle, so that one stall does not size a whole
    run."""
    steps = segment.step_seconds
    return median(sum(steps[first : first + cycle]) / cycle for first in range(0, len(steps), cycle))


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A measurement and what belongs beside it in the report."""

    measurement: Measurement
    result: SubjectResult
    sizing: Sizing | None
    seconds: float
    difference: str = ""
    missing_losses: int = 0
    sentinel: Sentinel | None = None


def measure(
    subject: Subject,
    arms: tuple[Arm, ...],
    collectors: Sequence[str],
    *,
    seed: int,
    time_s: float,
    rule: StoppingRule,
    reporter: Reporter,
    min_segment_s: float = MIN_SEGMENT_S,
    end_s: float | None = None,
    ready: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> MeasuredRun:
    """Open the subject, run the plan, close it. A subject that raises leaves its fault in the measurement,
    not an exception.

    Nor does Ctrl-C while it runs: what was measured so far is kept, as an incomplete set.

    Args:
        time_s: for measuring.
        end_s: time on `clock` at which all should be over: what building took beyond its share, measuring
            gives up.
        ready: called between building and measuring; waits for whatever must not run beside a measurement.

    Raises:
        UserError: bad input, found while the subject is built.
    """
    started = clock()
    runner = Runner(subject, arms, seed, time_s, rule, reporter, min_segment_s, clock)
    result = SubjectResult()
    faults: list[str] = []
    try:
        subject.open()
        reporter.say(
            f"{subject.name}: built in {human_time(clock() - started)}; warming up {subject.warmup} steps"
        )
        if ready is not None:
            ready()
        if end_s is not None:
            runner.time_s = min(time_s, max(LEAST_S, end_s - clock()))
        standing = run_sentinel(subject.devices)
        before = state.read_state(subject.devices)
        try:
            result = subject.run(runner.requests(), runner.on_segment)
        except (Exception, KeyboardInterrupt) as error:
            faults.append(_fault(error, runner))
        after = state.with_seen(state.read_state(subject.devices), runner.gpus.seen)
        sentinel = Sentinel(standing, run_sentinel(subject.devices))
    finally:
        subject.close()
    if not runner.taken and not faults:
        faults.append("no segment was taken")
    check = check_losses(runner.taken, result.losses, subject.cycle)
    measurement = Measurement(
        subject=subject.name,
        cycle=subject.cycle,
        arms=arms,
        collectors=tuple(collectors),
        segments=check.segments,
        before=before,
        after=after,
        accounted_percent=result.accounted_percent or {},
        losses=check.losses,
        washout_steps=subject.washout,
        warmup_steps=subject.warmup,
        rounds=runner.rounds_done,
        stopped=runner.stopped or "crash",
        seed=seed,
        pipeline_efficiency=efficiency(check.segments, result.stage_tokens_per_second),
        faults=(*faults, *result.faults),
    )
    return MeasuredRun(
        measurement, result, runner.sizing, clock() - started, check.difference, check.missing, sentinel
    )


def efficiency(segments: Sequence[Segment], stage_tokens_per_second: float | None) -> float | None:
    """Throughput of `off` over that of the slowest stage alone; None when either is unknown."""
    found = throughput(segments, OFF)
    return found[0] / stage_tokens_per_second if found and stage_tokens_per_second else None


def _fault(error: BaseException, runner: Runner) -> str:
    count = len(runner.taken)
    place = f"after {count} segments" if count else "before the first segment"
    if isinstance(error, KeyboardInterrupt):
        runner.stopped = INTERRUPTED
        return f"{INTERRUPTED} {place}"
    traceback.print_exception(error, file=sys.stderr)
    return f"{runner.subject.name} crashed {place}: {type(error).__name__}: {error}"
