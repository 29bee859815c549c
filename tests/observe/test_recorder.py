"""Spans and counters as a worker writes them: switches thrown midway, event pairs, rings that are full, GPUs
that are lost."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest

from dflash.device import Device
from dflash.observe.collectors.profile import ProfileCollector
from dflash.observe.histogram import SpanReader
from dflash.observe.recorder import CudaStageTimer, Instrument, StageTimer, WorkerRecorder
from tests.clock import Clock
from tests.observe.parts import FakeDevice, FakeGpu, recorder_on, sources


def step(timer: StageTimer, between: Callable[[], None] = lambda: None) -> None:
    """What a worker writes around a stage."""
    if timer.on:
        timer.start()
    between()
    if timer.on:
        timer.stop()


def count(timer: StageTimer) -> int:
    return timer.count


def test_a_span_is_timed_by_the_host_clock(clock: Clock) -> None:
    timer = StageTimer("x")
    reader = SpanReader(timer)
    timer.switch(True)
    step(timer, lambda: clock.advance(0.01))
    window = reader.read()
    assert window is not None
    found = window.statistics_ms()
    assert found["count"] == 1
    assert found["mean"] == 10.0


def test_off_records_nothing() -> None:
    timer = StageTimer("x")
    step(timer)
    assert count(timer) == 0


def make_host() -> tuple[StageTimer, FakeGpu | None]:
    return StageTimer("x"), None


def make_cuda() -> tuple[StageTimer, FakeGpu | None]:
    device = FakeDevice()
    recorder = recorder_on(device)
    timer = recorder.timer("x", gpu=True)
    recorder.warm()
    return timer, device.gpu


@pytest.mark.parametrize("make", [make_host, make_cuda])
def test_switching_on_in_the_middle_of_a_stage_records_nothing(
    make: Callable[[], tuple[StageTimer, FakeGpu | None]],
) -> None:
    timer, _ = make()
    step(timer, lambda: timer.switch(True))
    assert count(timer) == 0
    step(timer)
    if isinstance(timer, CudaStageTimer):
        timer._pool._device.gpu.finish()
        timer._pool.drain()
    assert count(timer) == 1


@pytest.mark.parametrize("make", [make_host, make_cuda])
def test_a_start_left_open_by_the_switch_is_forgotten(
    make: Callable[[], tuple[StageTimer, FakeGpu | None]],
) -> None:
    timer, gpu = make()
    timer.switch(True)
    step(timer, lambda: timer.switch(False))
    # Off for long, and on again in the middle of a stage: its `stop` must not close the old `start`.
    step(timer, lambda: timer.switch(True))
    if gpu is not None:
        assert isinstance(timer, CudaStageTimer)
        gpu.finish()
        timer._pool.drain()
    assert count(timer) == 0


def test_throwing_the_switch_a_thousand_times_leaks_no_event_pair() -> None:
    device = FakeDevice()
    recorder = recorder_on(device, ring=4)
    timer = recorder.timer("x", gpu=True)
    assert isinstance(timer, CudaStageTimer)
    recorder.warm()
    for index in range(1000):
        if index % 3 == 0:
            timer.switch(index % 2 == 0)
        step(timer, lambda index=index: timer.switch(index % 5 != 0) if index % 7 == 0 else None)
        device.gpu.finish()
        recorder.step_boundary()
    timer.switch(True)
    step(timer)
    device.gpu.finish()
    recorder.step_boundary()
    pool = timer._pool
    assert len(pool.free) + pool._head - pool._tail + (timer._pair is not None) == 4
    assert timer.dropped == 0


def test_gpu_stages_are_read_when_the_gpu_has_passed_them_and_not_before() -> None:
    device = FakeDevice()
    recorder = recorder_on(device)
    first, second = recorder.timer("first", gpu=True), recorder.timer("second", gpu=True)
    recorder.switch_timers(True)
    recorder.warm()
    device.gpu.finish()
    step(first)
    step(second)
    recorder.step_boundary()
    assert count(first) == count(second) == 0
    device.gpu.finish(2)
    recorder.step_boundary()
    assert (count(first), count(second)) == (1, 0)
    device.gpu.finish()
    recorder.step_boundary()
    assert (count(first), count(second)) == (1, 1)
    assert first.ring[0] == 1_000_000  # the fake GPU takes a millisecond for each operation


def test_a_step_boundary_asks_about_the_oldest_pair_only_while_the_gpu_is_behind() -> None:
    device = FakeDevice()
    recorder = recorder_on(device, ring=16)
    timer = recorder.timer("x", gpu=True)
    recorder.switch_timers(True)
    recorder.warm()
    for _ in range(10):
        step(timer)
    asked = device.gpu.queries
    recorder.step_boundary()
    assert device.gpu.queries == asked + 1


def test_events_are_made_and_recorded_before_the_first_step_and_never_again() -> None:
    device = FakeDevice()
    recorder = recorder_on(device, ring=4)
    timer = recorder.timer("x", gpu=True)
    assert isinstance(timer, CudaStageTimer)
    recorder.warm()
    created = device.gpu.created
    assert created == 8
    recorder.switch_timers(True)
    for _ in range(50):
        step(timer)
        device.gpu.finish()
        recorder.step_boundary()
    assert device.gpu.created == created
    assert count(timer) == 50
    assert all(
        event.streams == [device.stream] * len(event.streams) for pair in timer._pool.free for event in pair
    )


def test_a_full_ring_drops_and_counts_and_recovers() -> None:
    device = FakeDevice()
    recorder = recorder_on(device, ring=3)
    timer = recorder.timer("x", gpu=True)
    recorder.switch_timers(True)
    recorder.warm()
    for _ in range(5):
        step(timer)
        recorder.step_boundary()
    assert timer.dropped == 2
    device.gpu.finish()
    recorder.step_boundary()
    assert count(timer) == 3
    step(timer)
    device.gpu.finish()
    recorder.step_boundary()
    assert count(timer) == 4


def test_a_cuda_error_in_the_drain_switches_the_timers_off_and_the_step_goes_on() -> None:
    device = FakeDevice()
    recorder = recorder_on(device)
    timer = recorder.timer("x", gpu=True)
    ProfileCollector(sources()).equip(recorder)
    recorder.switch_timers(True)
    recorder.warm()
    step(timer)
    device.gpu.lost = True
    recorder.step_boundary()
    assert recorder.fault is not None
    assert recorder.fault[0] == "profile"
    assert not timer.on
    recorder.fault = None
    recorder.step_boundary()
    assert recorder.fault is None


def test_on_the_cpu_gpu_stages_use_the_host_clock() -> None:
    recorder = WorkerRecorder("target", 0, Device("cpu"))
    timer = recorder.timer("x", gpu=True)
    assert type(timer) is StageTimer
    recorder.step_boundary()


def test_a_timer_made_after_the_switch_was_thrown_is_on() -> None:
    recorder = WorkerRecorder("target", 0, Device("cpu"))
    recorder.switch_timers(True)
    assert recorder.timer("x").on
    assert recorder.timer("x") is recorder.timer("x")


class Probe(Instrument):
    def __init__(self) -> None:
        self.runs = 0
        self.error: Exception | None = None

    def run(self) -> None:
        self.runs += 1
        if self.error is not None:
            raise self.error


def test_the_pool_is_looked_at_only_while_something_is_pending() -> None:
    device = FakeDevice()
    recorder = recorder_on(device)
    timer = recorder.timer("x", gpu=True)
    recorder.step_boundary()
    assert not recorder.pool.on
    recorder.switch_timers(True)
    step(timer)
    recorder.switch_timers(False)
    recorder.step_boundary()
    assert recorder.pool.on  # the GPU has not passed it
    device.gpu.finish()
    recorder.step_boundary()
    assert not recorder.pool.on
    assert count(timer) == 1


def test_an_instrument_runs_at_the_boundary_while_it_is_on() -> None:
    recorder, probe = WorkerRecorder("target", 0, Device("cpu")), Probe()
    recorder.hang("probe", probe)
    recorder.step_boundary()
    assert probe.runs == 0
    probe.on = True
    recorder.step_boundary()
    assert probe.runs == 1


def test_an_instrument_that_fails_is_off_and_leaves_word_of_its_collector() -> None:
    recorder, bad, good = WorkerRecorder("target", 0, Device("cpu")), Probe(), Probe()
    bad.on = good.on = True
    bad.error = RuntimeError("planted")
    recorder.hang("bad", bad)
    recorder.hang("good", good)
    recorder.step_boundary()
    recorder.step_boundary()
    assert recorder.fault == ("bad", bad.error)
    assert (bad.runs, good.runs) == (1, 2)


def test_a_boundary_with_everything_off_allocates_nothing() -> None:
    recorder = WorkerRecorder("target", 0, Device("cpu"))
    recorder.hang("probe", Probe())
    recorder.step_boundary()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    for _ in range(100):
        recorder.step_boundary()
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The loop's own iterator is all that exists for a moment.
    assert held - before < 200
    assert peak - before < 400
