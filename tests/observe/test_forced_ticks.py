"""The monitor's clock in other hands: a tick that is asked for does what one by time does, and `idle` says
when all that it started is done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.observe.collectors.base import Collector
from dflash.observe.histogram import RING, SpanReader
from dflash.observe.nvml import GpuReader
from dflash.observe.outbox import SinkThread
from dflash.observe.recorder import StageTimer
from dflash.observe.registry import COLLECTORS
from dflash.observe.sinks.base import Row, RowKind
from tests.clock import Clock
from tests.observe.parts import ListSink
from tests.observe.test_monitor import Run
from tests.waiting import HANG_S, wait_until

SPANS = 3


class Held(Run):
    """An observer whose clock the test holds; a screen shows every tick when `live`."""

    def __init__(self, folder: Path, clock: Clock, live: bool = True) -> None:
        super().__init__(folder, tick_s=3600, flush_s=5 * 3600)
        self.clock = clock
        self.timer = self.drafter.timer("drafter.forward")
        if not live:
            self.sink.kinds = frozenset({"metrics", "train"})
            self.observer._monitor._live = False
        self.observer.hold_clock()
        self.observer.start()
        self.rest()

    def rest(self) -> None:
        wait_until(lambda: self.observer.idle)

    def work(self, steps: int = 1) -> None:
        """What `steps` steps of the workers leave."""
        for _ in range(steps):
            for _ in range(SPANS):
                self.timer.add(5_000_000)
            for recorder in (self.target, self.drafter):
                recorder.batches += 1
                recorder.tokens += 10
                recorder.busy_ns += 1000
            self.queue.counters.put_count += 1
            self.queue.counters.get_count += 1
            counters = self.prefetcher.counters
            counters.batches += 1
            counters.samples += 2
            counters.tokens += 10
            counters.padded_tokens += 16
            counters.loss_tokens += 5
            counters.length_bins[4] += 2
            self.observer.late(counters.batches, {"train/loss": 2.0})


@pytest.fixture
def hold(tmp_path: Path, clock: Clock) -> Iterator[Callable[..., Held]]:
    made: list[Held] = []

    def build(live: bool = True) -> Held:
        made.append(Held(tmp_path / str(len(made)), clock, live))
        return made[-1]

    yield build
    for one in made:
        one.observer.close()


def comparable(rows: Sequence[Row]) -> list[tuple[RowKind, int, float, dict[str, float]]]:
    """Rows without what the monitor says of its own time, keys kept."""
    return [
        (
            row.kind,
            row.step,
            row.seconds,
            {key: 0.0 if key.startswith("monitor/") else value for key, value in row.values.items()},
        )
        for row in rows
        if row.kind in ("live", "metrics", "train")
    ]


@pytest.mark.parametrize("live", [True, False])
def test_a_forced_tick_has_the_rows_and_keys_of_one_by_time(
    hold: Callable[..., Held], clock: Clock, live: bool
) -> None:
    forced, timed = hold(live), hold(live)
    for run in (forced, timed):
        run.observer.discard()
        run.rest()
    for number in range(1, 11):
        clock.advance(3600)
        forced.work()
        timed.work()
        if number % 5:
            forced.observer.force_tick()
        else:
            forced.observer.force_flush()
        timed.observer._monitor.tick()  # it flushes by itself: every fifth hour
        forced.rest()
        timed.rest()
    rows = comparable(forced.sink.rows)
    assert rows == comparable(timed.sink.rows)
    kinds = [kind for kind, *_ in rows]
    assert kinds.count("metrics") == 2
    assert kinds.count("live") == (10 if live else 0)
    assert kinds.count("train") == 10
    flushed = [values for kind, _, _, values in rows if kind == "metrics"]
    assert [values["profile/drafter.forward_count"] for values in flushed] == [5 * SPANS, 5 * SPANS]
    assert {"profile/drafter.forward_ms_p99", "drafter/0/tokens", "batch/length_p95"} <= set(flushed[0])


def test_collectors_that_a_tick_does_not_ask_stay_out_of_its_rows_and_heap_nothing_up(
    hold: Callable[..., Held], clock: Clock
) -> None:
    run = hold(live=False)
    everything = frozenset(COLLECTORS.names)
    halves = [frozenset({"profile", "batch"}), frozenset({"workers", "pipeline"})]
    run.observer.discard(flush=True)
    run.rest()
    for sample in (*halves, *halves, everything, frozenset()):
        run.work()
        clock.advance(3600)
        run.observer.discard(sample, flush=True)
        run.rest()
        assert run.observer.idle
        run.observer.force_flush(sample)
        run.rest()
        values = run.sink.of("metrics")[-1].values
        of_workers = dict.fromkeys(("target", "drafter", "train", "host"), "workers")
        found = {of_workers.get(family, family) for family in (key.partition("/")[0] for key in values)}
        assert found - {"monitor", "probe"} == sample - {"gpu", "cuda"}
        if "profile" in sample:
            assert values["profile/drafter.forward_count"] == SPANS, "one step's, whatever went before"
        if "batch" in sample:
            assert values["batch/batches"] == 1
        if "workers" in sample:
            assert values["drafter/0/tokens"] == 10
        if "pipeline" in sample:
            assert values["pipeline/put_batches"] == 1


def test_a_collector_just_switched_on_has_had_its_first_reading(hold: Callable[..., Held]) -> None:
    run = hold()
    run.observer.switch("batch", False)
    run.observer.switch("batch", True)
    run.observer.discard(keep={"batch"})
    run.rest()
    run.work()
    run.observer.force_tick({"batch"})
    run.rest()
    assert run.sink.of("live")[-1].values["batch/batches"] == 1


def test_a_ticks_worth_of_spans_waits_after_a_shorter_time(hold: Callable[..., Held]) -> None:
    run = hold()
    run.work(10)
    run.observer.discard()
    run.rest()
    run.work()
    run.observer.discard(keep={"profile"}, share=4.0)
    run.rest()
    run.observer.force_tick({"profile"})
    run.rest()
    assert run.sink.of("live")[-1].values["profile/drafter.forward_count"] == 4 * SPANS


@given(st.integers(0, 3 * RING), st.integers(0, 2 * RING), st.floats(0.0, 50.0))
def test_stretched_spans_are_old_ones_read_again(before: int, new: int, share: float) -> None:
    timer = StageTimer("x")
    reader = SpanReader(timer)
    for _ in range(before):
        timer.add(1)
    reader.read()
    for _ in range(new):
        timer.add(1)
    reader.stretch(share)
    window = reader.read()
    found = 0 if window is None else sum(window.counts.values()) + window.missed
    wanted = round(share * new)
    assert found == (wanted if wanted <= new else min(before + new, max(new, min(RING, wanted))))


def test_nothing_ticks_while_the_clock_is_held_and_it_ticks_again_after(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.observer.hold_clock()
    run.observer.start()
    wait_until(lambda: run.observer.idle)
    monitor = run.observer._monitor
    waited: list[float | None] = []

    class Wake(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout)
            return super().wait(timeout)

    old, monitor._wake = monitor._wake, Wake()
    old.set()  # the monitor looks at what it waits for from here on
    for _ in range(3):
        run.observer.force_tick()
        wait_until(lambda: run.observer.idle)
    assert monitor.ticks == 3
    assert set(waited) == {None}
    run.observer.release_clock()
    wait_until(lambda: monitor.ticks > 6)
    run.observer.hold_clock()
    wait_until(lambda: run.observer.idle)
    assert run.observer.close().ticks == monitor.ticks


def test_a_failing_tick_is_told(hold: Callable[..., Held]) -> None:
    run = hold()
    assert run.observer.monitor_fault is None
    run.observer._monitor._before_tick = lambda everything: 1 / 0  # type: ignore[assignment,return-value]
    run.observer.force_tick()
    run.rest()
    assert isinstance(run.observer.monitor_fault, ZeroDivisionError)


# -- idle ----------------------------------------------------------------------------------------------------


class Gate:
    """Something that stands where the test wants it to."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.open.wait(HANG_S)


def test_not_idle_while_a_tick_runs(hold: Callable[..., Held]) -> None:
    run, gate = hold(), Gate()
    run.observer.discard()
    run.rest()
    run.probe.also = gate
    run.observer.force_tick()
    assert not run.observer.idle
    assert gate.reached.wait(HANG_S)
    assert not run.observer.idle
    gate.open.set()
    run.rest()


def test_not_idle_while_a_sink_writes() -> None:
    class Slow(ListSink):
        gate = Gate()

        def write(self, rows: list[Row]) -> None:
            self.gate()
            super().write(rows)

    sink = Slow()
    thread = SinkThread(sink)
    assert not thread.idle, "not opened yet"
    thread.start()
    wait_until(lambda: thread.idle)
    thread.outbox.put(Row("event", 0.0, 0))
    assert not thread.idle
    assert sink.gate.reached.wait(HANG_S)
    assert len(thread.outbox) == 0
    assert not thread.idle
    sink.gate.open.set()
    wait_until(lambda: thread.idle)
    thread.close(HANG_S)
    assert thread.idle


def test_not_idle_while_a_reader_reads() -> None:
    gate = Gate()

    def read(handle: object) -> dict[str, float]:
        gate()
        return {"power_w": 1.0}

    reader = GpuReader(0, None, print, slow_s=HANG_S, readings={"power": read})
    wait_until(lambda: reader.idle)
    reader.take()
    assert not reader.idle
    assert gate.reached.wait(HANG_S)
    assert not reader.idle
    gate.open.set()
    wait_until(lambda: reader.idle)
    assert reader.take() == {"power_w": 1.0}
    wait_until(lambda: reader.idle)
    reader.close()


def test_not_idle_while_a_collectors_thread_works(hold: Callable[..., Held]) -> None:
    class Working(Collector):
        name, metrics, busy = "working", (), True

        def sample(self, now_ns: int) -> dict[str, float]:
            return {}

        def idle(self) -> bool:
            return not self.busy

    run = hold()
    built = run.observer.add(Working)
    assert not run.observer.idle
    built.busy = False  # type: ignore[attr-defined]
    assert run.observer.idle
