"""Threads on a clock of their own."""

from __future__ import annotations

import threading

import pytest

from steptime.simulate.virtual_threads import Stuck, VirtualTime


def test_time_passes_where_a_thread_sleeps_and_turns_are_taken_in_its_order() -> None:
    time, seen = VirtualTime(), []

    def sleeper(name: str, seconds: float) -> None:
        for _ in range(2):
            time.sleep(seconds)
            seen.append((name, time.now_s))

    time.spawn("slow", lambda: sleeper("slow", 3600.0))
    time.spawn("quick", lambda: sleeper("quick", 1000.0))
    time.run()
    assert seen == [("quick", 1000.0), ("quick", 2000.0), ("slow", 3600.0), ("slow", 7200.0)]


def test_conditions_wake_in_order_and_at_the_time_of_the_call() -> None:
    time, seen, ready = VirtualTime(), [], []
    condition = time.threading.Condition(time.threading.Lock())

    def waits(name: str) -> None:
        with condition:
            while not ready:
                condition.wait()
            ready.pop()
            seen.append((name, time.now_s))

    def gives() -> None:
        for _ in range(2):
            time.sleep(5.0)
            with condition:
                ready.append(1)
                condition.notify()

    for name in ("first", "second"):
        time.threading.Thread(target=lambda name=name: waits(name), name=name).start()  # type: ignore[misc]
    time.spawn("gives", gives)
    time.run()
    assert seen == [("first", 5.0), ("second", 10.0)]


def test_a_barrier_holds_until_all_are_there_again_and_again_and_breaks_for_all() -> None:
    time, seen = VirtualTime(), []
    barrier = time.threading.Barrier(2)

    def meets(seconds: float, times: int) -> None:
        for _ in range(times):
            time.sleep(seconds)
            barrier.wait()
            seen.append(time.now_s)

    def left_alone() -> None:
        meets(1.0, 2)
        with pytest.raises(threading.BrokenBarrierError):
            barrier.wait()
        seen.append("broken")

    def leaves() -> None:
        meets(3.0, 2)
        time.sleep(1.0)
        barrier.abort()

    time.spawn("left alone", left_alone)
    time.spawn("leaves", leaves)
    time.run()
    assert seen == [3.0, 3.0, 6.0, 6.0, "broken"]


def test_threads_that_wait_for_one_another_are_named() -> None:
    time = VirtualTime()
    condition = time.threading.Condition()
    time.spawn("lonely", condition.wait)
    time.spawn("done", lambda: time.sleep(2.0))
    with pytest.raises(Stuck, match=r"at 2\.000 s; these wait: lonely"):
        time.run()


def test_the_first_error_ends_the_run() -> None:
    time = VirtualTime()

    def breaks() -> None:
        time.sleep(1.0)
        raise ZeroDivisionError

    time.spawn("goes on", lambda: time.sleep(2.0))
    time.spawn("breaks", breaks)
    with pytest.raises(ZeroDivisionError):
        time.run()
    assert time.now_s == 1.0
