"""The conductor: pairs in blocks, planned outside the subject's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from steptime.measure.conductor import OVERTIME, PILOT_EVENTS, PILOT_SEGMENTS, Conductor, Look
from steptime.measure.lengths import Lengths, Pilot, choose
from steptime.measure.settling import LengthPilot
from steptime.progress import Reporter
from steptime.records.pairs import PLACEBO, Layer, Pair, Request, Segment
from steptime.statistics.design import draws
from steptime.subjects.pairs import Stretch, Wanted
from tests.clock import Clock

SWITCHES = ("a", "b")


@dataclass
class Enough:
    """Stops at so many pairs."""

    pairs: int = 40
    threads: set[str] = field(default_factory=set)

    def look(self, pairs: Sequence[Pair], elapsed_s: float, time_s: float) -> Look:
        self.threads.add(threading.current_thread().name)
        return Look(len(pairs) >= self.pairs, "clear")


@dataclass
class FakeSubject:
    """Takes 0.1 s for a step on a clock of its own, 0.05 s more for a tick and 0.2 s for a flush."""

    clock: Clock
    crash_at: int = -1
    end_at: int = -1
    asked: list[Request] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    stretched: bool = False
    waits_from: int = 10**9
    waits_for_flush: bool = False

    def __call__(self, requests: Iterator[Wanted], on_segment: Callable[[Segment], None]) -> None:
        for request in requests:
            if isinstance(request, Stretch):
                self.stretched = True
                continue
            if len(self.asked) == self.crash_at:
                raise RuntimeError("planted crash")
            if len(self.asked) == self.end_at:
                return
            self.threads.add(threading.current_thread().name)
            self.asked.append(request)
            more = {Layer.PATH: 0.0, Layer.TICK: 0.05, Layer.FLUSH: 0.2}[request.layer]
            waits = max(0, request.steps - self.waits_from) * ("wait" in request.on)
            seconds = 0.1 * request.steps + more + 0.02 * waits
            self.clock.advance(seconds)
            on_segment(
                Segment(
                    tuple(sorted(request.on)),
                    request.steps,
                    10 * request.steps,
                    seconds,
                    request.group,
                    tick_s=seconds if self.waits_for_flush and request.layer is Layer.FLUSH else more,
                )
            )


def make(clock: Clock, judge: Enough | None = None, *, time_s: float = 1000.0) -> Conductor:
    def draw(lengths: Lengths) -> Iterator[object]:
        return draws(SWITCHES, 0, {layer: lengths.pair_s(layer) for layer in Layer})

    return Conductor(
        switches=SWITCHES,
        events=(Layer.TICK, Layer.FLUSH),
        draw=draw,  # type: ignore[arg-type]
        judge=judge or Enough(),
        choose=choose,
        groups=3,
        time_s=time_s,
        reporter=Reporter(quiet=True),
        clock=clock.seconds,
    )


def test_both_halves_of_a_pair_do_equal_work_with_complementary_switches() -> None:
    clock = Clock()
    conductor, subject = make(clock), FakeSubject(clock)
    conductor.run(subject)
    assert len(conductor.pairs) >= 40
    assert [pair.number for pair in conductor.pairs] == list(range(len(conductor.pairs)))
    for pair in conductor.pairs:
        assert set(pair.first.on) ^ set(pair.second.on) == {*SWITCHES, PLACEBO}
        assert (pair.first.steps, pair.first.group) == (pair.second.steps, pair.second.group)
    pilot = PILOT_SEGMENTS + 2 * PILOT_EVENTS
    assert [request.pair for request in subject.asked[:pilot]] == [-1] * pilot
    assert [request.half for request in subject.asked[pilot:]] == [0, 1] * len(conductor.pairs)
    assert {pair.layer for pair in conductor.pairs} == set(Layer)


def test_a_group_changes_between_blocks_only_and_each_group_comes_before_any_comes_again() -> None:
    clock = Clock()
    conductor = make(clock, Enough(120))
    conductor.run(FakeSubject(clock))
    groups = [pair.first.group for pair in conductor.pairs]
    blocks = [group for place, group in enumerate(groups) if place == 0 or group != groups[place - 1]]
    assert len(blocks) < len(groups) / 4
    assert set(blocks[:3]) == {0, 1, 2}


def test_planning_and_looking_happen_outside_the_subjects_thread() -> None:
    clock, judge = Clock(), Enough()
    subject = FakeSubject(clock)
    make(clock, judge).run(subject)
    assert judge.threads == {"conductor"}
    assert subject.threads == {threading.current_thread().name}


def test_it_ends_when_the_time_is_long_over_whatever_the_judge_says() -> None:
    clock = Clock()
    conductor = make(clock, Enough(10**9), time_s=20.0)
    conductor.run(FakeSubject(clock))
    assert conductor.stopped == "clear" or conductor.stopped == "time"
    assert OVERTIME * 20.0 < clock.seconds() - 1.0 < OVERTIME * 20.0 + 10.0


@pytest.mark.fault
def test_a_subject_that_raises_leaves_the_pairs_before_it() -> None:
    clock = Clock()
    conductor = make(clock, Enough(10**9))
    with pytest.raises(RuntimeError, match="planted crash"):
        conductor.run(FakeSubject(clock, crash_at=100))
    assert conductor.pairs
    assert conductor.stopped == "the subject ended"


@pytest.mark.fault
def test_a_subject_that_ends_early_ends_the_run() -> None:
    clock = Clock()
    conductor = make(clock, Enough(10**9))
    conductor.run(FakeSubject(clock, end_at=100))
    assert conductor.stopped == "the subject ended"


@pytest.mark.fault
def test_a_judge_that_raises_ends_the_run_with_its_error() -> None:
    class Broken(Enough):
        def look(self, pairs: Sequence[Pair], elapsed_s: float, time_s: float) -> Look:
            raise ValueError("planted in the judge")

    clock = Clock()
    with pytest.raises(ValueError, match="planted in the judge"):
        make(clock, Broken()).run(FakeSubject(clock))


@pytest.mark.fault
def test_what_was_on_when_the_subject_crashed_is_known() -> None:
    clock = Clock()
    conductor = make(clock, Enough(10**9))
    subject = FakeSubject(clock, crash_at=100)
    with pytest.raises(RuntimeError):
        conductor.run(subject)
    assert conductor.running_on is not None
    assert conductor.running_on not in [request.on for request in subject.asked[-1:]]


def test_what_comes_first_is_over_before_the_pilot_and_nothing_else_runs_then() -> None:
    clock = Clock()
    order: list[str] = []
    conductor = make(clock)
    conductor.opening, conductor.ready = [Stretch(3)], lambda: order.append("ready")
    subject = FakeSubject(clock)
    conductor.run(subject)
    assert subject.stretched
    assert order == ["ready"]


def test_lengths_of_the_layers() -> None:
    events = {Layer.TICK: 0.05, Layer.FLUSH: 0.3}
    short = choose(Pilot(0.1, {Layer.TICK: 1, Layer.FLUSH: 4}, events, ends_s=0.002))
    assert short.steps == {Layer.PATH: 1, Layer.TICK: 1, Layer.FLUSH: 4}
    assert short.pair_s(Layer.FLUSH) == pytest.approx(2 * (4 * 0.1 + 0.3 + 0.002))
    assert choose(Pilot(0.1, {}, {}, ends_s=0.1)).steps == {Layer.PATH: 3}
    assert choose(Pilot(0.001, {}, {})).steps == {Layer.PATH: 10}
    assert choose(Pilot(0.1, {}, {}), settled_steps=8).steps == {Layer.PATH: 8}
    with pytest.raises(ValueError, match="some time"):
        choose(Pilot(0.0, {}, {}))


def test_the_pilot_of_lengths_comes_before_all_pairs() -> None:
    """A wait that costs nothing in a single step, and 20 ms in each later one: one step is not enough."""
    clock = Clock()
    conductor = make(clock)
    settle = conductor.settle = LengthPilot("wait", 50.0, clock=clock.seconds)
    conductor.run(FakeSubject(clock, waits_from=1))
    assert settle.decide().steps > 1
    assert all("wait" not in pair.first.on for pair in conductor.pairs)


@pytest.mark.fault
def test_a_segment_that_ends_by_waiting_for_its_tick_gets_longer() -> None:
    """The flush takes longer than the step: with one step, its wait would be counted as its cost."""
    clock = Clock()
    conductor = make(clock)
    conductor.run(FakeSubject(clock, waits_for_flush=True))
    assert conductor.lengths is not None
    assert conductor.lengths.steps == {Layer.PATH: 1, Layer.TICK: 1, Layer.FLUSH: 6}
