"""The step clock: which steps are dropped, which are timed, and that a known slowdown is as large as was
asked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.records.types import Arm
from bench.subjects import spin
from bench.subjects.protocol import SegmentRequest, Stepper, Taken, busy_wait
from bench.subjects.spin import Noise, SimulatedClock, SpinSubject
from tests.clock import Clock

OFF = Arm("off")
ON = Arm("only:x", frozenset({"x"}))


class Rig:
    """A stepper on a simulated clock; step i takes (i mod 4 + 1) ms."""

    def __init__(self, requests: list[SegmentRequest], **arguments: object) -> None:
        self.clock = SimulatedClock()
        self.taken: list[Taken] = []
        self.thrown: list[str] = []
        self.asked = 0
        self.stepper = Stepper(
            cycle=4,
            requests=self._count(requests),
            on_segment=self.taken.append,
            switch=lambda arm: self.thrown.append(arm.name),
            clock_ns=self.clock,
            delay=self.clock.advance,
            **arguments,  # type: ignore[arg-type]
        )

    def _count(self, requests: list[SegmentRequest]) -> Iterator[SegmentRequest]:
        for request in requests:
            self.asked += 1
            yield request

    def run(self, steps: int) -> None:
        for step in range(steps):
            self.clock.advance((step % 4 + 1) * 1e6)
            self.stepper(step, 100 * (step % 4 + 1))


def test_the_washout_is_dropped_and_the_segment_is_whole() -> None:
    rig = Rig([SegmentRequest(OFF, 0, 0, steps=8, washout=3)])
    rig.run(12)
    (taken,) = rig.taken
    # Step 0's boundary starts the plan; steps 1 to 3 are washed out; 4 to 11 are measured.
    assert taken.first_step == 4
    assert taken.segment.phase == 0
    assert taken.segment.step_seconds == pytest.approx([0.001, 0.002, 0.003, 0.004] * 2)
    assert taken.segment.seconds == pytest.approx(0.020)
    assert taken.segment.step_tokens == (100, 200, 300, 400) * 2
    assert taken.segment.tokens == 2000
    assert rig.stepper.finished


def test_any_phase_holds_the_same_batches() -> None:
    rig = Rig([SegmentRequest(OFF, 0, place, steps=4, washout=2) for place in range(5)])
    rig.run(40)
    assert len(rig.taken) == 5
    assert {taken.segment.phase for taken in rig.taken} == {1, 3}
    assert {taken.segment.tokens for taken in rig.taken} == {1000}
    assert all(taken.segment.seconds == pytest.approx(0.010) for taken in rig.taken)


def test_without_a_washout_segments_follow_each_other() -> None:
    rig = Rig([SegmentRequest(OFF, 0, 0, 4, 0), SegmentRequest(ON, 0, 1, 4, 0)])
    rig.run(9)
    assert [taken.first_step for taken in rig.taken] == [1, 5]
    assert rig.thrown == ["off", "only:x"]


def test_the_next_request_is_taken_only_when_the_last_segment_is_there() -> None:
    rig = Rig([SegmentRequest(OFF, 0, 0, 4, 1), SegmentRequest(OFF, 0, 1, 4, 1)])
    rig.run(5)
    assert (rig.asked, len(rig.taken)) == (1, 0)
    rig.run(1)
    assert (rig.asked, len(rig.taken)) == (2, 1)


@pytest.mark.parametrize("share", [0.01, 0.02, 0.05, 0.5])
@pytest.mark.parametrize("waits_on_host", [True, False])
def test_an_injected_share_of_the_throughput_is_lost_exactly(share: float, waits_on_host: bool) -> None:
    requests = [SegmentRequest(arm, 0, place, 64, 4) for place, arm in enumerate((OFF, ON))]
    rig = Rig(requests, injected={"x": share}, waits_on_host=waits_on_host)
    rig.run(140)
    off, on = (taken.segment for taken in rig.taken)
    if waits_on_host:
        assert 1 - off.seconds / on.seconds == pytest.approx(share, abs=1e-6)
    else:
        # The simulated host sees no wait of the device, so here the share is of the step without it.
        assert on.seconds / off.seconds == pytest.approx(1 + share, abs=1e-6)


def test_what_one_wait_overshoots_the_next_one_owes() -> None:
    requests = [SegmentRequest(arm, 0, place, 64, 4) for place, arm in enumerate((OFF, ON))]
    rig = Rig(requests, injected={"x": 0.05})
    advance = rig.clock.advance
    rig.stepper._delay = lambda ns: advance(ns + 60_000)  # a clumsy wait, 60 us too long each time
    rig.run(140)
    off, on = (taken.segment for taken in rig.taken)
    assert 1 - off.seconds / on.seconds == pytest.approx(0.05, abs=0.002)


def test_the_calls_around_a_wait_are_part_of_the_loss() -> None:
    requests = [SegmentRequest(arm, 0, place, 64, 4) for place, arm in enumerate((OFF, ON))]
    rig = Rig(requests, injected={"x": 0.01})
    clock, delay = rig.clock, rig.stepper._delay

    def slow_to_return(nanoseconds: int) -> None:
        delay(nanoseconds)
        clock.advance(5_000)

    rig.stepper._delay = slow_to_return
    rig.run(140)
    off, on = (taken.segment for taken in rig.taken)
    assert 1 - off.seconds / on.seconds == pytest.approx(0.01, abs=1e-4)


def test_both_ends_of_a_segment_wait_for_the_device() -> None:
    fences: list[int] = []
    rig = Rig([SegmentRequest(OFF, 0, 0, 4, 2)], fence=lambda: fences.append(rig.clock.now_ns))
    rig.run(8)
    assert len(fences) == 2
    assert (fences[1] - fences[0]) * 1e-9 == pytest.approx(rig.taken[0].segment.seconds)


def test_what_is_left_to_others_at_the_end_belongs_to_the_segment() -> None:
    requests = [SegmentRequest(arm, 0, place, 4, 0) for place, arm in enumerate((OFF, ON))]
    rig = Rig(requests, injected={"x": 0.2})
    # Nothing is left at a segment's begin; 6 ms of a target's work at its end.
    rig.stepper._fence = lambda: rig.clock.advance(6e6) if rig.stepper._done == 3 else None
    rig.run(9)
    off, on = (taken.segment for taken in rig.taken)
    assert off.seconds == pytest.approx(0.016)
    assert off.step_seconds == pytest.approx([0.002, 0.003, 0.004, 0.001 + 0.006])
    assert 1 - off.seconds / on.seconds == pytest.approx(0.2, abs=1e-6), (
        "the share is of the whole segment, its end included"
    )


@pytest.mark.parametrize(("washout", "pauses"), [(0, [0, 4, 8]), (2, [0, 2, 6, 8, 12])])
def test_where_the_fence_waits_next_is_known_before(washout: int, pauses: list[int]) -> None:
    """Other drafters must stand at the same boundary, so they have to know it while they work on the step
    before."""
    rig = Rig([SegmentRequest(OFF, 0, place, 4, washout) for place in range(2)])
    known = [0]
    fenced: list[int] = []
    rig.stepper._fence = lambda: fenced.append(step)
    for step in range(14):
        rig.clock.advance(1e6)
        rig.stepper(step, 100)
        if rig.stepper.pause_step not in (known[-1], -1):
            known.append(rig.stepper.pause_step)
    assert known == pauses
    assert set(fenced) <= set(pauses)
    assert rig.stepper.pause_step == -1


def test_a_busy_wait_takes_its_time(clock: Clock) -> None:
    clock.step_ns = 20_000  # each look at the clock
    began_ns = clock.now_ns
    spent = busy_wait(3_000_000)
    assert 3_000_000 <= spent <= clock.now_ns - began_ns <= 3_000_000 + 5 * clock.step_ns


def test_the_spin_subject_works_for_real(clock: Clock) -> None:
    clock.step_ns = 1_000_000
    subject = SpinSubject(cycle=4)
    taken: list[Taken] = []
    subject.open()
    result = subject.run(iter([SegmentRequest(OFF, 0, 0, 8, 1)]), taken.append)
    subject.close()
    assert len(taken) == 1
    assert taken[0].segment.seconds >= 0.008, "a look at the clock in each step"
    assert len(result.losses) == 4 + 1 + 8
    assert len({loss for step, loss in result.losses if step % 4 == 2}) == 1


def test_two_spin_subjects_do_the_same_work_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides of a gate are one such process; work fitted to the core's speed would differ by what the fit
    erred."""
    hashed: list[int] = []
    monkeypatch.setattr(spin.hashlib, "sha256", lambda data: hashed.append(len(data)))
    for _ in range(2):
        subject = SpinSubject(cycle=4)
        subject.open()
        subject.run(iter([SegmentRequest(OFF, 0, 0, 4, 0)]), lambda item: None)
    half = len(hashed) // 2
    assert sum(hashed) > 2 * 4 * spin.STEP_BYTES * 0.99
    assert hashed[:half] == hashed[half:]


def test_the_simulated_spin_subject_is_reproducible() -> None:
    def once() -> list[Taken]:
        taken: list[Taken] = []
        subject = SpinSubject(noise=Noise(seed=7))
        subject.open()
        subject.run(iter([SegmentRequest(OFF, 0, place, 8, 1) for place in range(3)]), taken.append)
        return taken

    assert once() == once()
