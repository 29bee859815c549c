"""The clock's helpers and the light subject's work."""

from __future__ import annotations

import pytest

from steptime.records.pairs import Request, Segment
from steptime.subjects import spin
from steptime.subjects.protocol import busy_wait
from steptime.subjects.spin import Noise
from steptime.subjects.spin_pairs import SpinPairs
from tests.clock import Clock

OFF = Request(frozenset(), 8, 0)


def run(subject: SpinPairs, *requests: Request) -> list[Segment]:
    taken: list[Segment] = []
    subject.open()
    subject.run_pairs(iter(requests), taken.append)
    subject.close()
    return taken


def test_a_busy_wait_takes_its_time(clock: Clock) -> None:
    clock.step_ns = 20_000  # each look at the clock
    began_ns = clock.now_ns
    spent = busy_wait(3_000_000)
    assert 3_000_000 <= spent <= clock.now_ns - began_ns <= 3_000_000 + 5 * clock.step_ns


def test_two_spin_subjects_do_the_same_work_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides of a gate are one such process; work fitted to the core's speed would differ by what the fit
    erred."""
    hashed: list[int] = []
    monkeypatch.setattr(spin.hashlib, "sha256", lambda data: hashed.append(len(data)))
    for _ in range(2):
        run(SpinPairs(groups=4), OFF)
    half = len(hashed) // 2
    assert sum(hashed) > 2 * 8 * 0.6 * spin.STEP_BYTES
    assert hashed[:half] == hashed[half:]


def test_the_simulated_spin_subject_is_reproducible() -> None:
    first, again = (run(SpinPairs(noise=Noise(seed=7)), OFF, OFF, OFF) for _ in range(2))
    assert first == again
