"""The monitor and the observer: windows, faults that stay where they are, switches while it runs, drops that
are counted.

`Run` has a monitor that ticks by itself, for what threads do to each other; a `Ticked` one is ticked by hand,
on a clock that the test moves, for what is in its rows.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from dflash.config import ObserveConfig
from dflash.observe.collectors.base import Collector
from dflash.observe.metric import Metric, MetricIndex
from dflash.observe.monitor import Monitor
from dflash.observe.observer import Observer
from dflash.observe.outbox import Outbox, SinkThread
from dflash.observe.registry import COLLECTORS, all_metrics
from dflash.observe.roles import RoleMap
from dflash.observe.sinks.base import Row, Sink
from dflash.observe.window import FlushWindow
from steptime.errors import UserError
from steptime.syncs.counting import CountingScopes
from tests.clock import Clock
from tests.observe.parts import FakePrefetcher, FakeQueue, ListSink
from tests.waiting import HANG_S, wait_until

ROLES = RoleMap(("cpu",), ("cpu",), rates=(("cpu", 1e9),))


class Probe(Collector):
    """A seventh collector: counts its samples, raises or does something else when told to."""

    name = "probe"
    metrics: ClassVar[tuple[Metric, ...]] = ()

    def __init__(self, sources: Any) -> None:
        super().__init__(sources)
        self.samples = 0
        self.error: Exception | None = None
        self.also: Callable[[], object] = lambda: None
        self.thread: str = ""

    def sample(self, now_ns: int) -> dict[str, float]:
        self.samples += 1
        self.thread = threading.current_thread().name
        self.also()
        if self.error is not None:
            raise self.error
        return {"probe/samples": float(self.samples)}


class Run:
    """An observer with quick ticks, a probe and a sink that keeps its rows."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.sink = ListSink()
        collectors = tuple(name for name in COLLECTORS.names if name != "gpu")
        settings = {"tick_s": 0.01, "flush_s": 0.05, "collectors": collectors} | config
        self.observer = Observer(ObserveConfig(**settings), folder, ROLES, sinks=[self.sink])
        built = self.observer.add(Probe)
        assert isinstance(built, Probe)
        self.probe = built
        self.target = self.observer.recorder("target", 0)
        self.drafter = self.observer.recorder("drafter", 0)
        self.queue, self.prefetcher = FakeQueue(), FakePrefetcher()
        self.observer.attach(queue=self.queue, prefetcher=self.prefetcher)
        self.observer.switch("probe", True)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.observer.close()


class Ticked(Run):
    """The monitor's own thread sleeps until the end; `tick` is an hour of the clock, every fifth one
    flushes."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        super().__init__(folder, tick_s=3600, flush_s=5 * 3600)
        self.clock = clock

    def tick(self, ticks: int = 1) -> None:
        for _ in range(ticks):
            self.clock.advance(3600)
            self.observer._monitor.tick()

    def live(self) -> list[Row]:
        """The rows of all ticks so far."""
        wait_until(lambda: len(self.sink.of("live")) == self.observer._monitor.ticks)
        return self.sink.of("live")


@pytest.fixture
def ticked(tmp_path: Path, clock: Clock) -> Iterator[Ticked]:
    made = Ticked(tmp_path, clock)
    yield made
    made.observer.close()


# -- looks at the interpreter lock ---------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts a thread's waits")
def test_the_monitor_looks_at_the_lock_between_its_ticks_while_workers_is_on(tmp_path: Path) -> None:
    run = Run(tmp_path, tick_s=3600, flush_s=36_000)
    lock = run.observer._sources.lock
    lock._mean_s = 1e-3
    run.observer.start()
    wait_until(lambda: lock.wakes > 20)
    run.observer.force_flush()
    wait_until(lambda: run.sink.of("metrics"))
    values = run.sink.of("metrics")[0].values
    assert values["host/lock_wakes"] > 20
    assert 0.0 <= values["host/lock_held_ratio"] <= 1.0
    run.observer.switch("workers", False)
    run.observer.force_tick(())  # wakes it, which ends the wait that is under way
    wait_until(lambda: run.observer._monitor.idle)
    before = lock.wakes
    run.observer.force_tick(())
    wait_until(lambda: run.observer._monitor.idle)
    assert lock.wakes == before
    run.observer.switch("workers", True)
    run.observer.hold_clock()
    wait_until(lambda: run.observer._monitor.idle)
    before = lock.wakes
    run.observer.force_tick(())  # a harness's tick is no look: nobody slept
    wait_until(lambda: run.observer._monitor.idle)
    assert lock.wakes == before
    run.observer.close()


# -- windows -------------------------------------------------------------------------------------------------


def test_a_window_adds_deltas_averages_instants_and_weighs_ratios() -> None:
    window = FlushWindow(lambda key: MetricIndex(all_metrics()).find(key))
    first = {
        "batch/tokens": 100.0,
        "batch/loss_token_fraction": 0.5,
        "pipeline/hs_queue_depth": 4.0,
        "monitor/lateness_ms": 3.0,
    }
    second = {
        "batch/tokens": 300.0,
        "batch/loss_token_fraction": 0.9,
        "pipeline/hs_queue_depth": 10.0,
        "drafter/0/step": 5.0,
    }
    window.add(first, 1.0)
    window.add(second, 2.0)
    values = window.take()
    assert values["batch/tokens"] == 400
    assert values["batch/loss_token_fraction"] == pytest.approx((50 + 270) / 400)
    assert values["pipeline/hs_queue_depth"] == pytest.approx((4 + 20) / 3)
    assert values["monitor/lateness_ms"] == 3.0
    assert values["drafter/0/step"] == 5.0
    assert window.take() == {}


def test_quantiles_are_not_averaged() -> None:
    window = FlushWindow(lambda key: MetricIndex(all_metrics()).find(key))
    window.add({"profile/drafter.forward_ms_p99": 5.0}, 1.0)
    assert window.take() == {}


# -- a run ---------------------------------------------------------------------------------------------------


def test_rows_come_for_every_tick_and_every_flush_and_every_key_is_declared(ticked: Ticked) -> None:
    run = ticked
    run.observer.switch("probe", False)
    timer = run.drafter.timer("drafter.forward")
    run.observer.start()
    for _ in range(20):
        timer.start()
        run.clock.advance(0.005)
        timer.stop()
        run.drafter.tokens += 10
        run.drafter.batches += 1
        run.queue.counters.put_count += 1
        run.tick()
    summary = run.observer.close()
    live, metrics = run.sink.of("live"), run.sink.of("metrics")
    assert (len(live), len(metrics)) == (20 + 1, 4 + 1), "the last of each at the end"
    keys = {key for row in (*live, *metrics) for key in row.values}
    assert "profile/drafter.forward_ms_p95" in keys
    assert not [key for key in keys if MetricIndex(all_metrics()).find(key) is None]
    assert sum(row.values.get("profile/drafter.forward_count", 0.0) for row in metrics) == 20
    assert sum(row.values.get("drafter/0/tokens", 0.0) for row in metrics) == 200
    assert summary.values["drafter/0/tokens"] == 200
    assert summary.values["profile/drafter.forward_ms_max"] == pytest.approx(5.0)
    assert run.sink.rows[0].kind == "run"
    assert run.sink.rows[-1].kind == "summary"


def test_every_key_that_is_declared_for_the_cpu_is_reported(ticked: Ticked) -> None:
    """A new key without a reading, or the other way round, shows here."""
    run = ticked
    stages = [
        run.target.timer(f"target.{name}") for name in ("model_forward", "pack_hidden", "cpu_copy_enqueue")
    ]
    stages += [
        run.drafter.timer(f"drafter.{name}")
        for name in ("queue_get", "forward", "backward", "optimizer_step")
    ]
    second = run.observer.recorder("target", 1), run.observer.recorder("drafter", 1)
    run.observer.recorder("prefetcher", 0).clock._ended_ns = 1
    run.observer.attach()
    run.observer.start()
    for timer in stages:
        timer.add(1000)
    run.queue.buckets, run.queue.oldest = {128: 1}, 1
    run.queue.counters.put_count = run.queue.counters.get_count = 1
    for recorder in (run.target, run.drafter, *second):
        recorder.busy_ns += 10
        recorder.tokens += 1
        recorder.clock._ended_ns = 1
    lock = run.observer._sources.lock
    lock.wakes += 1
    run.observer.standing._total_ns += 1
    counters = run.prefetcher.counters
    counters.length_bins[3] += 1
    counters.batches = counters.samples = counters.tokens = counters.padded_tokens = counters.loss_tokens = 1
    run.tick(5)
    run.observer.close()
    keys = {key for row in run.sink.of("metrics") for key in row.values}
    off = ("gpu/", "cuda/", "train/", "heldout/")
    declared = [metric for metric in all_metrics() if not metric.key.startswith(off)]
    missing = [metric.key for metric in declared if not any(metric.pattern.fullmatch(key) for key in keys)]
    assert missing == []


def test_a_collector_that_raises_goes_away_with_one_line_and_the_rest_stays(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.observer.start()
    wait_until(lambda: run.probe.samples > 2)
    with caplog.at_level(logging.WARNING):
        run.probe.error = ValueError("planted")
        wait_until(lambda: not run.probe.on)
        ticks = run.sink.of("live")
        wait_until(lambda: len(run.sink.of("live")) > len(ticks) + 3)
    lines = [record.message for record in caplog.records]
    assert lines == ["collector probe is off: ValueError: planted"]
    assert run.observer.switches()["pipeline"]
    assert not run.observer.switches()["probe"]
    summary = run.observer.close()
    assert summary.failed == {"probe": "ValueError: planted"}
    assert [row.values["text"] for row in run.sink.of("event")] == [
        "collector probe is off: ValueError: planted"
    ]
    assert "pipeline/hs_queue_depth" in run.sink.of("live")[-1].values


@pytest.mark.fault
@pytest.mark.parametrize("value", [torch.ones(()), torch.ones((), device="meta"), "1.0", None])
def test_a_collector_that_gives_no_number_goes_away_and_no_sink_sees_it(ticked: Ticked, value: Any) -> None:
    """Whoever formats a tensor waits for its device; a tensor of `meta` would raise there."""
    ticked.probe.sample = lambda now_ns: {"probe/samples": value}  # type: ignore[method-assign]
    ticked.observer.start()
    ticked.tick(10)
    ticked.observer.close()
    (line,) = [row.values["text"] for row in ticked.sink.of("event")]
    assert line.startswith("collector probe is off: TypeError: probe/samples is a ")
    assert not any("probe/samples" in row.values for row in ticked.sink.rows)


@pytest.mark.fault
def test_a_sink_that_waits_is_seen_in_its_own_role(tmp_path: Path) -> None:
    scopes = CountingScopes(cuda=False)
    scopes.arm()
    sink = ListSink()
    loss = torch.ones(())
    sink.write = lambda rows: float(loss)  # type: ignore[method-assign]
    thread = SinkThread(sink)
    thread.scopes = scopes
    thread.outbox.put(1)
    thread.start()
    assert thread.close(HANG_S)
    assert [key[:2] for key in scopes.counts()] == [(f"sink/{sink.name}", "float()")]


def test_a_workers_cuda_error_switches_the_collector_off(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.observer.start()
    run.target.fault = ("profile", RuntimeError("CUDA error"))
    wait_until(lambda: "collector profile is off: RuntimeError: CUDA error" in caplog.text)
    assert not run.observer.switches()["profile"]


def test_a_fault_of_the_monitor_itself_stops_nothing(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    failed = itertools.count(1)
    last = 0

    def broken(everything: bool) -> None:
        nonlocal last
        last = next(failed)
        raise RuntimeError("planted in the monitor")

    run.observer._monitor._before_tick = broken
    run.observer.start()
    wait_until(lambda: run.observer._monitor.fault is not None)
    wait_until(lambda: last > 3)
    run.observer.late(1, {"train/loss": 1.0})
    run.observer.close()
    assert sum("a tick failed" in record.message for record in caplog.records) == 1


def test_switches_can_be_thrown_while_it_runs(ticked: Ticked) -> None:
    run = ticked
    run.observer.start()
    run.tick()
    assert "pipeline/hs_queue_depth" in run.live()[-1].values
    run.observer.switch("pipeline", False)
    assert not run.queue.count
    run.tick()
    assert not any(key.startswith("pipeline/") for key in run.live()[-1].values)
    run.observer.switch("pipeline", True)
    assert run.queue.count
    run.tick(2)  # the first one only has something to count from
    assert "pipeline/hs_queue_depth" in run.live()[-1].values


def test_a_storm_of_switches_from_several_threads_does_no_harm(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns = Clock()  # of the worker's loop: a span lasts longer only if it was begun in an earlier turn
    run.observer.start()
    timer = run.drafter.timer("drafter.forward")
    monkeypatch.setattr(sys.modules[type(timer).__module__], "perf_counter_ns", turns.ns)
    stop = threading.Event()
    thrown: dict[str, int] = {}

    def throw(name: str) -> None:
        on = False
        while not stop.is_set():
            run.observer.switch(name, on)
            thrown[name] = thrown.get(name, 0) + 1
            on = not on

    def work() -> None:
        while not stop.is_set():
            turns.advance(1.0)
            if timer.on:
                timer.start()
            if timer.on:
                timer.stop()

    threads = [threading.Thread(target=throw, args=(name,)) for name in ("profile", "workers", "batch")]
    threads.append(threading.Thread(target=work))
    for thread in threads:
        thread.start()
    ticks = run.observer._monitor.ticks
    wait_until(lambda: len(thrown) == 3 and min(thrown.values()) > 200)
    wait_until(lambda: turns.now_ns > 1000 * 10**9 and run.observer._monitor.ticks > ticks + 20)
    stop.set()
    for thread in threads:
        thread.join()
    summary = run.observer.close()
    assert summary.failed == {}
    longest = [row.values.get("profile/drafter.forward_ms_max", 0.0) for row in run.sink.of("live")]
    assert max(longest) == 0.0


def test_training_scalars_are_tagged_with_their_own_step(run: Run) -> None:
    run.drafter.step = 9
    run.observer.start()
    run.observer.late(3, {"train/loss": 2.5})
    run.observer.late(4, {"train/loss": 2.4})
    run.observer.close()
    assert [(row.step, row.values) for row in run.sink.of("train")] == [
        (3, {"train/loss": 2.5}),
        (4, {"train/loss": 2.4}),
    ]


def test_unknown_collectors_are_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown collector 'pipline'; did you mean 'pipeline'"):
        Observer(ObserveConfig(collectors=("pipline",)), tmp_path, ROLES, sinks=[])


class FakeStop:
    """In place of the event that ends the monitor: a wait moves the clock, and after so many it is over."""

    def __init__(self, clock: Clock, monitor: Monitor, waits: int) -> None:
        self.clock, self.monitor, self.left = clock, monitor, waits
        self.waited: list[float] = []

    def wait(self, timeout_s: float) -> bool:
        self.waited.append(timeout_s)
        self.clock.advance(timeout_s)
        self.left -= 1
        self.monitor._over = self.left < 0
        return self.monitor._over

    def set(self) -> None:
        pass

    clear = set


def test_the_monitor_reports_its_lateness(
    clock: Clock,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monitor = run.observer._monitor
    stop = FakeStop(clock, monitor, 5)
    monkeypatch.setattr(monitor, "_wake", stop)
    run.observer.switch("workers", False)  # it would look at the lock on the way
    slow = iter((0.0, 0.0, 0.05, 0.0, 0.0))  # of ticks every 10 ms, the third takes 50
    run.probe.fresh = False
    run.probe.also = lambda: clock.advance(next(slow, 0.0))
    run.observer._sinks[0].start()
    monitor._loop()
    run.observer._sinks[0].outbox.close()
    assert run.observer._sinks[0].close(HANG_S)
    late = [row.values["monitor/lateness_ms"] for row in run.sink.of("live")]
    took = [row.values.get("monitor/tick_ms", 0.0) for row in run.sink.of("live")]
    assert late == pytest.approx([0.0, 0.0, 0.0, 40.0, 0.0, 0.0], abs=1e-6)
    assert took == pytest.approx([0.0, 0.0, 0.0, 50.0, 0.0, 0.0], abs=1e-6)
    # Four ticks were missed in the stall; it makes up for one of them.
    assert stop.waited == pytest.approx([0.01, 0.01, 0.01, 0.0, 0.0, 0.01])


def test_samples_are_taken_in_the_monitors_thread(run: Run) -> None:
    run.observer.start()
    run.observer.switch("probe", False)
    run.observer.switch("probe", True)
    seen = run.probe.samples
    wait_until(lambda: run.probe.samples > seen + 1)
    assert run.probe.thread == "monitor"


def test_close_before_start_and_twice(run: Run) -> None:
    assert run.observer.close().ticks == 0
    assert run.observer.close().ticks == 0


# -- accounts ------------------------------------------------------------------------------------------------


def test_the_account_charges_calls_and_cpu_time_to_who_used_them(ticked: Ticked) -> None:
    run, clock = ticked, ticked.clock
    timer = run.drafter.timer("drafter.forward")
    run.observer.start()
    for _ in range(1000):
        timer.start()
        timer.stop()
    run.probe.also = lambda: clock.advance(0.5)
    before_s = {account.name: account.on_s for account in run.observer.accounts()}
    run.tick(4)
    run.observer.switch("workers", False)
    run.tick(2)
    run.observer.close()
    clock.step_ns = 1000  # each look at the clock takes a microsecond, so that a span takes two
    accounts = {account.name: account for account in run.observer.accounts()}
    clock.step_ns = 0
    profile = accounts["profile"]
    assert profile.calls == 1000
    assert profile.call_ns == pytest.approx(2000, rel=0.01)
    assert profile.seconds == pytest.approx(profile.calls * profile.call_ns / 1e9 + profile.cpu_s)
    # The clock of the threads' CPU time is the same one here: seven ticks of half a second each.
    assert accounts["probe"].cpu_s == pytest.approx(7 * 0.5)
    assert profile.cpu_s == 0.0
    on_s = {name: account.on_s - before_s[name] for name, account in accounts.items()}
    assert on_s["profile"] - on_s["workers"] == pytest.approx(2 * 3600 + 3 * 0.5, abs=0.1)
    shares = run.observer.accounted_percent()
    assert shares["all"] == pytest.approx(sum(value for name, value in shares.items() if name != "all"))


# -- outbox --------------------------------------------------------------------------------------------------


class StuckSink(Sink):
    """Does not come back from a write until told."""

    name: ClassVar[str] = "stuck"

    def __init__(self) -> None:
        self.go = threading.Event()
        self.entered = threading.Event()
        self.written: list[Any] = []

    def write(self, rows: list[Row]) -> None:
        self.entered.set()
        self.go.wait(HANG_S)
        self.written.extend(rows)


def test_an_outbox_drops_the_oldest_and_counts() -> None:
    outbox = Outbox(3)
    for index in range(5):
        outbox.put(index)
    assert outbox.dropped == 2
    assert outbox.take() == [2, 3, 4]
    outbox.close()
    assert outbox.take() is None


def test_a_stuck_sink_costs_the_sender_nothing_and_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    sink = StuckSink()
    thread = SinkThread(sink, capacity=10)
    thread.start()
    thread.outbox.put("first")
    assert sink.entered.wait(HANG_S)
    for index in range(10_000):
        thread.outbox.put(index)
    assert sink.written == [], "all were put while the sink was stuck"
    assert thread.dropped == 9_990
    assert not thread.close(0.05)
    assert "stuck: not finished after" in caplog.text
    sink.go.set()


def test_a_sink_that_raises_is_given_up_with_one_line_and_its_rows_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = ListSink()
    sink.fail = OSError("no such server")
    thread = SinkThread(sink)
    thread.start()
    for index in range(4):
        thread.outbox.put(index)
        wait_until(lambda: len(thread.outbox) == 0)
    assert thread.close(HANG_S)
    assert thread.dropped == 4
    assert [record.message for record in caplog.records] == ["list: given up: OSError: no such server"]
