"""Threads on a clock of their own."""

from __future__ import annotations

import threading

import pytest

from steptime.simulate.virtual_threads import Stuck, VirtualTime


def test_time_passes_where_a_thread_sleeps_and_turns_are_taken_in_its_order() -> None:
    virtual, seen = VirtualTime(), []

    def sleeper(name: str, seconds: float) -> None:
        for _ in range(2):
            virtual.sleep(seconds)
            seen.append((name, virtual.now_s))

    virtual.spawn("slow", lambda: sleeper("slow", 3600.0))
    virtual.spawn("quick", lambda: sleeper("quick", 1000.0))
    virtual.run()
    assert seen == [("quick", 1000.0), ("quick", 2000.0), ("slow", 3600.0), ("slow", 7200.0)]


def test_conditions_wake_in_order_and_at_the_time_of_the_call() -> None:
    virtual, seen, ready = VirtualTime(), [], []
    condition = virtual.threading.Condition(virtual.threading.Lock())

    def waits(name: str) -> None:
        with condition:
            while not ready:
                condition.wait()
            ready.pop()
            seen.append((name, virtual.now_s))

    def gives() -> None:
        for _ in range(2):
            virtual.sleep(5.0)
            with condition:
                ready.append(1)
                condition.notify()

    for name in ("first", "second"):
        virtual.threading.Thread(target=lambda name=name: waits(name), name=name).start()  # type: ignore[misc]
    virtual.spawn("gives", gives)
    virtual.run()
    assert seen == [("first", 5.0), ("second", 10.0)]


def test_a_barrier_holds_until_all_are_there_again_and_again_and_breaks_for_all() -> None:
    virtual, seen = VirtualTime(), []
    barrier = virtual.threading.Barrier(2)

    def meets(seconds: float, times: int) -> None:
        for _ in range(times):
            virtual.sleep(seconds)
            barrier.wait()
            seen.append(virtual.now_s)

    def left_alone() -> None:
        meets(1.0, 2)
        with pytest.raises(threading.BrokenBarrierError):
            barrier.wait()
        seen.append("broken")

    def leaves() -> None:
        meets(3.0, 2)
        virtual.sleep(1.0)
        barrier.abort()

    virtual.spawn("left alone", left_alone)
    virtual.spawn("leaves", leaves)
    virtual.run()
    assert seen == [3.0, 3.0, 6.0, 6.0, "broken"]


def test_threads_that_wait_for_one_another_are_named() -> None:
    virtual = VirtualTime()
    condition = virtual.threading.Condition()
    virtual.spawn("lonely", condition.wait)
    virtual.spawn("done", lambda: virtual.sleep(2.0))
    with pytest.raises(Stuck, match=r"at 2\.000 s; these wait: lonely"):
        virtual.run()


def test_the_first_error_ends_the_run() -> None:
    virtual = VirtualTime()

    def breaks() -> None:
        virtual.sleep(1.0)
        raise ZeroDivisionError

    virtual.spawn("goes on", lambda: virtual.sleep(2.0))
    virtual.spawn("breaks", breaks)
    with pytest.raises(ZeroDivisionError):
        virtual.run()
    assert virtual.now_s == 1.0
