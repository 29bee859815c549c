"""CPU time of a thread, read by another; the share of time for which the interpreter lock is held."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steptime import host_time
from steptime.host_time import HeldShare, LockProbe, ThreadClock, held_share, lock_unseen
from tests.waiting import wait_until

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts a thread's waits")
LOOKS = 60


@contextmanager
def working(work: Callable[[], object]) -> Iterator[ThreadClock]:
    """A thread that does `work` over and over, and has begun."""
    clock, over, rounds = ThreadClock(), threading.Event(), [0]

    def run() -> None:
        with clock.running():
            while not over.is_set():
                work()
                rounds[0] += 1

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: rounds[0] > 0)
    try:
        yield clock
    finally:
        over.set()
        thread.join()


def python() -> None:
    sum(range(2000))


# -- the lock ------------------------------------------------------------------------------------------------


@on_linux
def test_a_thread_in_python_holds_the_lock_and_one_in_a_matrix_product_does_not() -> None:
    """Planted holders of a share that is known: nearly all, and nearly none. Both keep a core busy."""
    matrix = torch.randn(600, 600)
    with working(python):
        held = held_share(LOOKS, mean_s=0.003)
    with working(lambda: torch.mm(matrix, matrix)):
        free = held_share(LOOKS, mean_s=0.003)
    assert held.wakes > LOOKS / 2
    assert free.wakes > LOOKS / 2
    assert held.share > 0.8
    assert free.share < 0.2


@on_linux
def test_a_wait_is_one_switch_here_so_that_a_second_one_means_the_lock() -> None:
    assert lock_unseen() == ""
    assert held_share(LOOKS, mean_s=0.003).share < 0.2


def test_looks_are_counted_by_the_waits_beyond_the_first() -> None:
    switches = iter([0, 1, 5, 5, 7, 9, 20, 24, 30, 31])
    probe = LockProbe(switches=lambda: next(switches))
    woken = iter([False, False, False, True, False])
    told = [probe.wait(lambda seconds: next(woken)) for _ in range(5)]
    # One wait; none, which was no look; two; four but woken by somebody, which is no look; one.
    assert told == [False, False, False, True, False]
    assert (probe.held, probe.wakes) == (1, 3)
    assert probe.found == HeldShare(1, 3)


def test_waits_are_random_and_no_longer_than_allowed() -> None:
    asked: list[float] = []
    probe = LockProbe(mean_s=1.0, switches=iter(range(1000)).__next__)
    for _ in range(100):
        probe.wait(asked.append, at_most_s=1.5)
    assert 0.0 <= min(asked) < 0.2
    assert max(asked) == 1.5
    assert len(set(asked)) > 50


def test_after_its_short_waits_a_probe_looks_only_when_it_would_wake_anyway() -> None:
    asked: list[float] = []
    probe = LockProbe(mean_s=1.0, short=3, switches=iter(range(1000)).__next__)
    for _ in range(6):
        probe.wait(asked.append, at_most_s=50.0)
    assert asked[3:] == [50.0] * 3
    assert max(asked[:3]) <= 2.0
    assert probe.wakes == 6


def test_a_system_that_does_not_count_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_time, "waits_of_this_thread", lambda: 7)
    assert lock_unseen() in (
        "the kernel does not count a thread's waits",
        "the system does not count a thread's context switches; Linux does",
    )
    monkeypatch.setattr(host_time, "resource", None)
    assert "Linux does" in lock_unseen()


@given(st.integers(0, 300), st.integers(0, 300))
def test_the_interval_holds_the_share_and_narrows_with_more_looks(held: int, free: int) -> None:
    found = HeldShare(held, held + free)
    low, high = found.bounds
    assert 0.0 <= low <= high <= 1.0
    if found.wakes:
        assert low - 1e-12 <= found.share <= high + 1e-12
        longer = HeldShare(4 * held, 4 * (held + free)).bounds
        assert longer[1] - longer[0] < high - low
    else:
        assert math.isnan(found.share)


# -- a thread's clock ----------------------------------------------------------------------------------------


def test_a_clock_has_nothing_before_its_thread_and_keeps_what_it_had_after() -> None:
    clock = ThreadClock()
    assert clock.read_ns() is None

    def run() -> None:
        with clock.running():
            python()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    ended = clock.read_ns()
    assert ended is not None
    assert ended > 0
    assert clock.read_ns() == ended


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows a thread's clock to others")
def test_a_clock_is_read_while_its_thread_works_and_stands_while_it_waits() -> None:
    with working(python) as clock:
        first = clock.read_ns()
        assert first is not None
        wait_until(lambda: (clock.read_ns() or 0) > first)
    go = threading.Event()
    waiting, clock = threading.Event(), ThreadClock()

    def wait() -> None:
        with clock.running():
            waiting.set()
            go.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    with working(python) as other:
        before, others = clock.read_ns(), other.read_ns()
        assert others is not None
        wait_until(lambda: (other.read_ns() or 0) > others + 20_000_000)
        after = clock.read_ns()
    go.set()
    thread.join()
    assert before is not None
    assert after is not None
    assert after - before < 10_000_000  # CPU time: of this thread alone


def test_without_such_clocks_a_thread_is_known_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("time.pthread_getcpuclockid", raising=False)
    with working(python) as clock:
        assert clock.read_ns() is None
    assert clock.read_ns()
