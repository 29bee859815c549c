"""Measures a subject in pairs: opens it, lets the conductor take pairs until it is enough, closes it, and
keeps all that belongs beside the pairs."""

from __future__ import annotations

import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from steptime.machine import state
from steptime.machine.gpu_watch import GpuWatch
from steptime.machine.sentinel import Sentinel, run_sentinel
from steptime.measure.conductor import Conductor, Look
from steptime.measure.cuts import Cuts
from steptime.measure.lengths import Lengths, Pilot, choose
from steptime.measure.settling import LengthPilot
from steptime.progress import Reporter, human_time
from steptime.records.pairs import PLACEBO, Layer, Pair, Question
from steptime.records.types import ALL, OFF, MachineState, Throughput
from steptime.statistics.design import MIN_PAIRS, TOGETHER, Draw, best_shares, draws, first_part_s, shares_for
from steptime.statistics.effects import loss
from steptime.statistics.enough import decide, plan, spreads
from steptime.statistics.throughput import throughput
from steptime.subjects.group_losses import check_pair_losses
from steptime.subjects.pairs import PairSubject, Round, Stretch, covers
from steptime.subjects.protocol import SubjectResult

LEAST_S = 15.0
"""Measuring gets so much time at least, however long building took."""
SETTLE_SHARE = 0.1
"""Of the time for pairs that the pilot of lengths may take on top."""
INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a run asks.

    Attributes:
        switches: what is judged, without the placebo.
        together: all of them as one, none by itself.
        control: beside them the control, where the subject has one and there are several switches.
        budget_percent: of all together; by it the time is judged.
        time_s: most seconds of pairs.
        end_s: time on the clock at which all should be over: what building took beyond its share, measuring
            gives up.
    """

    switches: tuple[str, ...]
    budget_percent: float
    time_s: float
    seed: int = 0
    together: bool = False
    control: bool = False
    end_s: float | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything that a run measured, before any judgement.

    Attributes:
        seconds_per: seconds between two events of each layer that was measured (path: 1).
        minutes: that pairs took.
        stopped: why measuring ended: "clear", "time", "interrupted", "crash", ...
        faults: what went wrong on the way, one line each.
        difference: one line for the first step whose loss is not what its group has always given.
        missing_losses: timed steps whose loss never arrived.
        seconds: of everything, building too.
    """

    subject: str
    asked: Asked
    pairs: tuple[Pair, ...]
    seconds_per: dict[Layer, float]
    result: SubjectResult = field(default_factory=SubjectResult)
    lengths: Lengths | None = None
    minutes: float = 0.0
    stopped: str = ""
    before: MachineState | None = None
    after: MachineState | None = None
    sentinel: Sentinel | None = None
    faults: tuple[str, ...] = ()
    difference: str = ""
    missing_losses: int = 0
    seconds: float = 0.0

    @property
    def losses_equal(self) -> bool | None:
        """None: some pair has no loss."""
        found = {pair.losses_equal for pair in self.pairs}
        return False if False in found else None if None in found or not found else True

    @property
    def notes(self) -> tuple[str, ...]:
        """What the report should tell besides."""
        events = [pair for pair in self.pairs if pair.layer is not Layer.PATH]
        halves = [half for pair in events for half in (pair.first, pair.second)]
        late = sum(not covers(half) for half in halves)
        if late * 10 <= len(halves):
            return tuple(self.result.notes)
        told = f"{late} of {len(halves)} segments with a tick or flush ended by waiting for it"
        return (*self.result.notes, f"{told}: that wait is counted as its cost")

    @property
    def throughput(self) -> Throughput | None:
        """Of everything off."""
        return throughput(self.pairs)

    @property
    def pipeline_efficiency(self) -> float | None:
        """Throughput with everything off over that of the slowest stage alone; None when either is
        unknown."""
        found, alone = self.throughput, self.result.stage_tokens_per_second
        return found.tokens_per_second / alone if found and alone else None


@dataclass(slots=True)
class _Enough:
    """Stops when the answer about all together is clear, or one more block would not end in time."""

    asked: Asked
    layers: tuple[Layer, ...]
    seconds_per: Mapping[Layer, float]
    question: Question
    reporter: Reporter
    announced: bool = False
    lengths: Lengths | None = None
    block_s: float = 0.0
    last_s: float = 0.0

    def restart(self) -> None:
        """Another run begins, on the same subject."""
        self.block_s = self.last_s = 0.0

    def look(self, pairs: Sequence[Pair], elapsed_s: float, time_s: float) -> Look:
        self.block_s, self.last_s = max(self.block_s, elapsed_s - self.last_s), elapsed_s
        y: dict[Layer, list[float]] = {layer: [] for layer in self.layers}
        for pair in pairs:
            if pair.question is self.question:
                y[pair.layer].append(loss(pair, self.seconds_per[pair.layer]))
        late = elapsed_s + self.block_s / 2 > time_s
        decision = decide(
            y,
            self.layers,
            self.asked.budget_percent,
            elapsed_s,
            # With too few pairs of a layer the run would say nothing at all; it may last longer for them.
            out_of_time=late and self._least(pairs),
        )
        if not self.announced:
            self._announce(pairs, time_s)
        left_s = 60.0 * decision.minutes - elapsed_s if decision.minutes < float("inf") else None
        return Look(decision.stop, decision.why, left_s)

    def _least(self, pairs: Sequence[Pair]) -> bool:
        """Whether each layer has its fewest pairs of each question."""
        single = len(self.asked.switches) == 1 and not self.asked.together
        asked = [self.question] if single or self.asked.together else list(Question)
        counts = Counter((pair.layer, pair.question) for pair in pairs)
        return all(counts[layer, question] >= MIN_PAIRS for layer in self.layers for question in asked)

    def _announce(self, pairs: Sequence[Pair], time_s: float) -> None:
        """Once, when the spread of each layer is known: what such a machine needs."""
        known = spreads(pairs, self.seconds_per)
        if len(known) < len(self.layers) or self.lengths is None:
            return
        self.announced = True
        lengths_s = {layer: self.lengths.pair_s(layer) for layer in self.layers}
        share = 1.0 if self.question is Question.EACH or self.asked.together else TOGETHER
        best = best_shares(lengths_s, self.seconds_per)
        wanted = plan(known, lengths_s, self.asked.budget_percent, shares=best, together=share)
        minutes = 60.0 * wanted.minutes()
        self.reporter.say(
            f"a pair spreads by {100 * known[Layer.PATH]:.1f}% here: about {human_time(minutes)} show that "
            f"all together cost less than {self.asked.budget_percent:g}%, if they cost nothing; "
            f"there are {human_time(time_s)}"
        )


def measure(
    subject: PairSubject,
    asked: Asked,
    reporter: Reporter,
    *,
    flushes: int = 3,
    ready: Callable[[], None] = lambda: None,
    cuts: Cuts | None = None,
    clock: Callable[[], float] = time.monotonic,
    rounds: bool = False,
) -> Measured:
    """Open the subject, take pairs, close it. A subject that raises leaves its fault in what is returned, not
    an exception; Ctrl-C likewise: what was measured so far is kept, as an incomplete set.

    Args:
        flushes: length of the undisturbed stretch from which the accounted cost comes.
        ready: waits for whatever must not run beside a measurement.
        cuts: take several such runs one after the other; where each one ends stands in there.
        rounds: also have one round of all off and one of all on recorded, before the first pair.

    Raises:
        UserError: bad input, found while the subject is built.
    """
    started = clock()
    gpus, faults = GpuWatch(subject.devices), list[str]()
    result = SubjectResult()
    standing = before = None
    try:
        subject.open()
        reporter.say(f"{subject.name}: built in {human_time(clock() - started)}")
        conductor = _conductor(subject, asked, reporter, gpus, clock, ready, flushes, cuts)
        if rounds:
            everything = frozenset(asked.switches)
            conductor.opening = [*conductor.opening, Round(OFF, frozenset()), Round(ALL, everything)]
        if asked.end_s is not None:
            conductor.time_s = min(asked.time_s, max(LEAST_S, asked.end_s - clock()))
        standing, before = run_sentinel(subject.devices), state.read_state(subject.devices)
        began = clock()

        def run(requests: Iterator[object], on_segment: Callable[..., None]) -> None:
            nonlocal result
            result = subject.run_pairs(requests, on_segment)  # type: ignore[arg-type]

        try:
            conductor.run(run)
        except (Exception, KeyboardInterrupt) as error:
            faults.append(_fault(error, subject.name, conductor))
        minutes = (conductor.pairs_s or clock() - began) / 60.0
        after = state.with_seen(state.read_state(subject.devices), gpus.seen)
        sentinel = Sentinel(standing, run_sentinel(subject.devices))
    finally:
        subject.close()
    if not conductor.pairs and not faults:
        faults.append("no pair was taken")
    losses = check_pair_losses(conductor.pairs, result.losses)
    return Measured(
        subject=subject.name,
        asked=asked,
        pairs=losses.pairs,
        seconds_per=seconds_per(subject.periods),
        result=result,
        lengths=conductor.lengths,
        minutes=minutes,
        stopped=conductor.stopped or "crash",
        before=before,
        after=after,
        sentinel=sentinel,
        faults=(*faults, *result.faults),
        difference=losses.difference,
        missing_losses=losses.missing,
        seconds=clock() - started,
    )


def seconds_per(periods: Mapping[Layer, float]) -> dict[Layer, float]:
    """Seconds between two events of each layer (path: 1). A flush is a tick too, so the ticks that are no
    flushes come a little less often than ticks do.

    Args:
        periods: seconds between two ticks, and between two flushes.
    """
    found = {Layer.PATH: 1.0, **periods}
    if Layer.TICK in periods and Layer.FLUSH in periods:
        found[Layer.TICK] = 1.0 / (1.0 / periods[Layer.TICK] - 1.0 / periods[Layer.FLUSH])
    return found


def _conductor(
    subject: PairSubject,
    asked: Asked,
    reporter: Reporter,
    gpus: GpuWatch,
    clock: Callable[[], float],
    ready: Callable[[], None],
    flushes: int,
    cuts: Cuts | None,
) -> Conductor:
    every = seconds_per(subject.periods)
    layers = tuple(every)
    single = len(asked.switches) == 1
    question = Question.EACH if single else Question.TOGETHER
    judge = _Enough(asked, layers, every, question, reporter)
    settle = LengthPilot(subject.pilot_switch, SETTLE_SHARE * asked.time_s, seed=asked.seed)
    if cuts is not None:
        cuts.judge, cuts.restart = judge, judge.restart

    def chosen(pilot: Pilot) -> Lengths:
        settled = settle.decide()
        if settle.switch is not None:
            reporter.say(f"pilot: {settled.why}")
        judge.lengths = choose(pilot, settled.steps)
        told = ", ".join(f"{judge.lengths.steps[layer]} ({layer})" for layer in layers)
        reporter.say(
            f"plan: pairs of neighbouring segments, steps in each: {told}; a step takes "
            f"{1e3 * pilot.step_s:.1f} ms; at most {human_time(conductor.time_s)}"
        )
        return judge.lengths

    def draw(lengths: Lengths) -> Iterator[Draw]:
        lengths_s = {layer: lengths.pair_s(layer) for layer in layers}
        together = 1.0 if asked.together else TOGETHER
        run_s = conductor.time_s if cuts is None else cuts.run_s
        best = best_shares(lengths_s, every)
        questions = 1.0 if single else together
        soon_s = first_part_s(lengths_s, run_s, questions)
        shares = shares_for(lengths_s, soon_s, questions, best)
        several = not single and not asked.together
        control = asked.control and several and getattr(subject, "controlled", False)
        return draws(asked.switches, asked.seed, lengths_s, shares=shares, together=together, control=control)

    conductor = Conductor(
        switches=(*asked.switches, PLACEBO),
        events=tuple(layer for layer in layers if layer is not Layer.PATH),
        draw=draw,
        judge=cuts or judge,
        choose=chosen,
        groups=subject.groups,
        time_s=asked.time_s if cuts is None else max(cuts.session_s, cuts.run_s),
        reporter=reporter,
        seed=asked.seed,
        settle=settle,
        opening=[Stretch(flushes)] if subject.periods else [],
        ready=ready,
        between=gpus.look,
        clock=clock,
    )
    return conductor


def _fault(error: BaseException, subject: str, conductor: Conductor) -> str:
    """One line; it names the switches that were on when the subject crashed."""
    count = len(conductor.pairs)
    place = f"after {count} pairs" if count else "before the first pair"
    if isinstance(error, KeyboardInterrupt):
        conductor.stopped = INTERRUPTED
        return f"{INTERRUPTED} {place}"
    traceback.print_exception(error, file=sys.stderr)
    on = conductor.running_on
    where = f" with {', '.join(sorted(on)) or 'nothing'} on" if on is not None else ""
    return f"{subject} crashed {place}{where}: {type(error).__name__}: {error}"
