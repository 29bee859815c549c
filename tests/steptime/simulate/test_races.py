"""The race check: each fault beside the program that is right."""

from __future__ import annotations

import threading

import pytest
import torch

from steptime.host_memory import staging
from steptime.simulate import Race, Simulation
from tests.steptime.simulate.parts import CPU_0, CPU_1, run_threads, settled, untraced


@pytest.fixture
def simulation():
    with Simulation().open() as opened:
        yield opened


def two_streams(simulation):
    return simulation.stream(0, "first"), simulation.stream(0, "second")


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("pair", ["write read", "read write", "write write"])
def test_two_streams_of_one_thread(simulation, pair, ordered):
    x = settled(simulation, 8)
    uses = {"write": lambda: x.add_(1), "read": lambda: x.sum()}
    (one, other), event = two_streams(simulation), simulation.event()
    before, after = pair.split()
    with one.active():
        uses[before]()
    event.record(one)
    if ordered:
        other.wait_event(event)
        with other.active():
            uses[after]()
        return
    with other.active(), pytest.raises(Race) as caught:
        uses[after]()
    text = str(caught.value)
    assert "MainThread on first" in text
    assert "MainThread on second" in text
    assert text.count("test_races.py:") == 2
    assert simulation.faults == [caught.value]


def test_two_reads_need_no_order(simulation):
    x = settled(simulation, 8)
    for stream in two_streams(simulation):
        with stream.active():
            x.sum()


def test_the_default_stream_orders_nothing(simulation):
    x = settled(simulation, 8)
    x.add_(1)
    with simulation.stream(0).active(), pytest.raises(Race, match="sim:0/default"):
        x.sum()


def test_an_event_recorded_too_early_orders_too_little(simulation):
    x = settled(simulation, 8)
    (one, other), event = two_streams(simulation), simulation.event()
    event.record(one)
    with one.active():
        x.add_(1)
    other.wait_event(event)
    with other.active(), pytest.raises(Race):
        x.sum()


def test_order_goes_on_over_a_third_stream(simulation):
    x = settled(simulation, 8)
    (one, other), third = two_streams(simulation), simulation.stream(1)
    with one.active():
        x.add_(1)
    third.wait_stream(one)
    other.wait_stream(third)
    with other.active():
        x.add_(1)


def test_parts_of_one_buffer_do_not_meet_and_views_at_other_offsets_do(simulation):
    x = settled(simulation, 16)
    one, other = two_streams(simulation)
    with one.active():
        x[:8].add_(1)
    with other.active():
        x[8:].add_(1)
        with pytest.raises(Race, match="on bytes 28 to 32 of 64"):
            x[7:9].sum()


def test_the_destination_of_a_copy_between_devices_waits_for_it(simulation):
    x = settled(simulation, 8)
    to, origin = simulation.stream(1), simulation.stream(0)
    with origin.active(), to.active():
        y = x.to(CPU_1)
        y.add_(1)
    with simulation.stream(0).active(), pytest.raises(Race, match="copy device to device"):
        x.add_(1)


class TestFreedMemory:
    def use(self, simulation):
        one, other = two_streams(simulation)
        with one.active():
            x = torch.zeros(8, device=CPU_0)
        other.wait_stream(one)
        with other.active():
            x.sum()
        return x, one, other

    def test_while_another_stream_reads_it_is_a_race(self, simulation):
        x, _, _ = self.use(simulation)
        del x
        with pytest.raises(
            Race, match=r"aten::sum by MainThread on second .*; then, freed by MainThread: .* on first may"
        ):
            simulation.settle()

    @pytest.mark.parametrize("right", ["record_stream", "wait", "host wait"])
    def test_is_right_when_it_was_said_or_ordered(self, simulation, right):
        x, one, other = self.use(simulation)
        if right == "record_stream":
            x.record_stream(other)
        elif right == "wait":
            one.wait_stream(other)
        else:
            other.synchronize()
        del x
        simulation.settle()
        assert simulation.counts.frees >= 1

    def test_its_address_may_come_again_for_another_tensor(self, simulation):
        stream = simulation.stream(0)
        for index in range(50):
            with (stream if index % 2 else simulation.default_stream(0)).active():
                torch.zeros(64, device=CPU_0).add_(1)


class TestHostMemory:
    def test_read_before_its_event_has_fired_is_a_race(self, simulation):
        x, ring = settled(simulation, 4), staging((4,), torch.float32, pin=True)
        stream, event = simulation.stream(0), simulation.event()
        with stream.active():
            ring.copy_(x, non_blocking=True)
        event.record(stream)
        with pytest.raises(Race, match="copy device to host by MainThread"):
            ring.clone()
        assert event.query()
        ring.clone()

    def test_numpy_is_a_read_too(self, simulation):
        x, ring = settled(simulation, 4), staging((4,), torch.float32, pin=True)
        ring.copy_(x, non_blocking=True)
        with pytest.raises(Race):
            ring.numpy()

    def test_rewritten_while_a_copy_still_reads_it_is_a_race(self, simulation):
        batch = staging((4,), torch.float32, pin=True).fill_(1)
        batch.to(CPU_0, non_blocking=True)
        with pytest.raises(Race, match="copy host to device"):
            batch.fill_(2)

    def test_a_blocking_copy_is_waited_for(self, simulation):
        batch = torch.ones(4)
        batch.to(CPU_0)
        batch.fill_(2)


class TestThreads:
    """Two threads, their order on the clock fixed by a lock that is not traced."""

    def pair(self, simulation, *, hand_over=True, recorded=True, waited=True):
        x, event = settled(simulation, 8), simulation.event()
        lock, turn = threading.Lock(), untraced()

        def first():
            with simulation.stream(0, "first").active():
                x.add_(1)
                if recorded:
                    event.record()
            if hand_over:
                with lock:
                    pass
            turn.release()

        def second():
            turn.acquire()
            if hand_over:
                with lock:
                    pass
            with simulation.stream(0, "second").active():
                if waited:
                    event.wait()
                x.sum()

        run_threads(simulation, first, second)

    def test_a_hand_over_and_an_event_order_them(self, simulation):
        self.pair(simulation)

    def test_without_a_hand_over_the_wait_may_be_void(self, simulation):
        with pytest.raises(Race, match=r"the wait may be void: wait by worker/1 .*; record by worker/0"):
            self.pair(simulation, hand_over=False)

    @pytest.mark.parametrize("missing", ["recorded", "waited"])
    def test_without_the_record_or_the_wait_there_is_no_order(self, simulation, missing):
        with pytest.raises(Race, match="aten::sum by worker/1 on second"):
            self.pair(simulation, **{missing: False})

    def test_a_record_that_may_overtake_a_wait_is_found(self, simulation):
        event, lock = simulation.event(), threading.Lock()
        recorded, waited = untraced(), untraced()

        def first():
            with simulation.stream(0, "first").active():
                with lock:
                    event.record()
                recorded.release()
                waited.acquire()
                event.record()

        def second():
            recorded.acquire()
            with lock, simulation.stream(0, "second").active():
                event.wait()
            waited.release()

        with pytest.raises(Race, match=r"the wait may be void: record by worker/0 .*; wait by worker/1"):
            run_threads(simulation, first, second)

    def test_what_one_thread_waited_for_another_does_not_know(self, simulation):
        x, turn = settled(simulation, 8), untraced()

        def first():
            with simulation.stream(0, "first").active():
                x.add_(1)
            simulation.synchronize(0)
            turn.release()

        def second():
            turn.acquire()
            with simulation.stream(0, "second").active():
                x.sum()

        with pytest.raises(Race):
            run_threads(simulation, first, second)

    def test_start_and_join_are_hand_overs(self, simulation):
        x = settled(simulation, 8)
        x.add_(1)
        simulation.synchronize(0)

        def body():
            with simulation.stream(0).active():
                x.add_(1)
            simulation.synchronize(0)

        run_threads(simulation, body)
        x.add_(1)

    def test_conditions_barriers_and_queues_are_hand_overs(self, simulation):
        import queue

        x, items, barrier = settled(simulation, 8), queue.Queue(), threading.Barrier(2)
        back = simulation.event()

        def first():
            with simulation.stream(0, "first").active():
                x.add_(1)
                event = simulation.event()
                event.record()
                items.put(event)
                barrier.wait()
                back.wait()
                x.add_(1)

        def second():
            with simulation.stream(0, "second").active():
                items.get().wait()
                x.sum()
                back.record()
                barrier.wait()

        run_threads(simulation, first, second)
