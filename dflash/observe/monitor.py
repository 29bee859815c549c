"""The monitor: one thread that samples the collectors, and hands rows to the sinks' outboxes. It makes no
CUDA call."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import Any

from dflash.observe.collectors.base import Collector
from dflash.observe.metric import Metric
from dflash.observe.outbox import SinkThread
from dflash.observe.sinks.base import Row, RowKind
from dflash.observe.syncs import NO_SCOPES, Scopes
from dflash.observe.timeline.log import SpanLog
from dflash.observe.window import FlushWindow
from steptime.host_time import LockProbe

logger = logging.getLogger("dflash.observe")

METRICS = (
    Metric("monitor/tick_ms", "ms", "instant", "time one tick of the monitor took", "the monitor's clock"),
    Metric(
        "monitor/lateness_ms",
        "ms",
        "instant",
        "how late the monitor woke: a signal of pressure on the interpreter lock",
        "the monitor's clock",
        reduce="max",
    ),
    Metric(
        "monitor/dropped", "rows", "delta", "rows that a full outbox or a failed sink lost", "the outboxes"
    ),
    Metric(
        "monitor/spans_dropped", "spans", "delta", "GPU spans that found no free event pair", "the recorders"
    ),
    Metric(
        "monitor/cpu_s", "s", "delta", "CPU time of the monitor's and the sinks' threads", "thread clocks"
    ),
)


@dataclass(frozen=True)
class Totals:
    """Counts that only grow, read once per tick."""

    rows_dropped: int = 0
    spans_dropped: int = 0
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Forced:
    """What somebody asked a tick for.

    Attributes:
        sample: the collectors that it asks; None: all that are on.
        flush: it flushes as well.
    """

    sample: Collection[str] | None
    flush: bool


class Monitor:
    """Ticks every `tick_s`, flushes every `flush_s`. Nothing that goes wrong in here reaches the training
    threads.

    A harness may take the clock away (`hold`): then there is a tick when it asks for one, and at no other
    time, until it gives the clock back (`release`).

    Args:
        collectors: asked in turn; one that raises is switched off through `fail`.
        sinks: rows go to the outbox of each sink that wants their kind.
        before_tick: moves what other threads left for the monitor (late scalars, workers' faults). Told
            whether anybody sees this tick: a screen is on, or a flush is due.
        totals: drops and CPU time up to now.
        step: drafter 0's optimizer step.
        lock: looks at the interpreter lock between two ticks, while it is on.
    """

    def __init__(
        self,
        collectors: Sequence[Collector],
        sinks: Sequence[SinkThread],
        *,
        tick_s: float,
        flush_s: float,
        before_tick: Callable[[bool], None],
        fail: Callable[[Collector, Exception], None],
        find: Callable[[str], Metric | None],
        totals: Callable[[], Totals],
        step: Callable[[], int],
        lock: LockProbe,
    ) -> None:
        self._collectors, self._sinks = collectors, sinks
        self._tick_s, self._flush_s = tick_s, flush_s
        self._live = any("live" in sink.sink.kinds for sink in sinks)
        self._before_tick, self._fail, self._totals, self._step = before_tick, fail, totals, step
        self._lock = lock
        self._window = FlushWindow(find)
        self.run_window = FlushWindow(find)
        self._started_ns = self._last_ns = self._flushed_ns = perf_counter_ns()
        self._before = Totals()
        self._tick_ms = 0.0
        self._wake = threading.Event()
        self._over = self._held = False
        self._orders: deque[Callable[[], None]] = deque()
        self._ordered = self._done = 0
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self.scopes: Scopes = NO_SCOPES
        self.log: SpanLog | None = None
        self.cpu_s = 0.0
        self.ticks = self.flushes = 0
        self.fault: Exception | None = None

    @property
    def elapsed_s(self) -> float:
        return (perf_counter_ns() - self._started_ns) / 1e9

    def start(self) -> None:
        self._started_ns = self._last_ns = self._flushed_ns = perf_counter_ns()
        for collector in self._collectors:
            if collector.on:
                # A first reading to count from, before the workers move.
                self._ask(collector, partial(collector.begin, self._started_ns))
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Tick and flush once more, then end."""
        self._over = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def send(
        self, kind: RowKind, values: dict[str, Any], step: int | None = None, seconds: float = 0.0
    ) -> None:
        """Put a row into the outboxes that want it. From any thread; never waits."""
        self._post([Row(kind, self.elapsed_s, self._step() if step is None else step, values, seconds)])

    def send_train(self, late: Sequence[tuple[int, dict[str, float]]]) -> None:
        """Likewise for training scalars, (step, values) each; all at once, so that a sink wakes once."""
        elapsed_s = self.elapsed_s
        self._post([Row("train", elapsed_s, step, values) for step, values in late])

    def _post(self, rows: list[Row]) -> None:
        for sink in self._sinks:
            if rows[0].kind in sink.sink.kinds:
                sink.outbox.put(*rows)

    # -- the clock in other hands; from one thread at a time -------------------------------------------------

    def hold(self) -> None:
        """No tick by time from now on; one that is under way ends before the monitor is idle."""
        self._held = True
        self._order(_nothing)

    def release(self) -> None:
        """Tick by time again, the next one `tick_s` from now; windows begin now."""
        self._order(self._restart)

    def force(self, sample: Collection[str] | None, flush: bool) -> None:
        """One tick now, with a flush or without: see `Observer.force_tick`."""
        self._order(partial(self._guarded_tick, 0.0, forced=Forced(sample, flush)))

    def discard(self, keep: Collection[str], flush: bool, share: float) -> None:
        """Prepare a forced tick: see `Observer.discard`."""
        self._order(partial(self._guarded, partial(self._discard, keep, flush, share)))

    @property
    def idle(self) -> bool:
        """Whether all that it was asked for is done. Of use while the clock is held: a tick by time may begin
        at any moment."""
        return self._done == self._ordered

    def _order(self, order: Callable[[], None]) -> None:
        self._ordered += 1
        self._orders.append(order)
        self._wake.set()

    def _restart(self) -> None:
        self._held = False
        self._last_ns = self._flushed_ns = perf_counter_ns()
        self._window.take()

    def _discard(self, keep: Collection[str], flush: bool, share: float) -> None:
        now_ns = perf_counter_ns()
        self._before_tick(True)
        if flush:
            self._window.take()
        on = [collector for collector in self._collectors if collector.on]
        for collector in on:
            if collector.fresh:
                self._ask(collector, partial(collector.begin, now_ns))
            elif collector.name not in keep:
                self._sample(now_ns, self._live or flush, (collector.name,))
                if flush:
                    self._ask(collector, collector.flush)
        for collector in on:
            self._ask(collector, partial(collector.stretch, share))

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with self.scopes.enter("monitor"):
            self._loop()

    def _loop(self) -> None:
        due = time.perf_counter() + self._tick_s
        while not self._over:
            asked = self._sleep(due)
            woken = time.perf_counter()
            if asked:
                self._obey()
                due = woken + self._tick_s
                continue
            self._guarded_tick((woken - due) * 1e3)
            # After a stall go on from when it ended, and do not hurry through the ticks missed.
            due = max(due, woken - self._tick_s) + self._tick_s
        self._guarded_tick(0.0, last=True)

    def _sleep(self, due: float) -> bool:
        """Until `due`, or for ever while the clock is held; whether somebody woke it. On the way it wakes to
        look at the interpreter lock, where that is on."""
        if self._held:
            return self._wake.wait()
        while self._lock.on and (left := due - time.perf_counter()) > 0.0:
            if self._lock.wait(self._wake.wait, left):
                return True
        return self._wake.wait(max(0.0, due - time.perf_counter()))

    def _obey(self) -> None:
        self._wake.clear()
        while self._orders and not self._over:
            self._orders.popleft()()
            self._done += 1

    def _guarded_tick(self, lateness_ms: float, last: bool = False, forced: Forced | None = None) -> None:
        self._guarded(partial(self.tick, lateness_ms, last, forced))

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            if self.fault is None:
                logger.exception("monitor: a tick failed; training goes on")
            self.fault = error

    def tick(self, lateness_ms: float = 0.0, last: bool = False, forced: Forced | None = None) -> None:
        """Sample every collector that is on; flush when it is time, or when this is the last tick. A forced
        one does what it was asked for."""
        now_ns = perf_counter_ns()
        window_s = (now_ns - self._flushed_ns) / 1e9
        flushing = last or window_s >= self._flush_s - self._tick_s / 2
        names = None
        if forced is not None:
            names, flushing = forced.sample, forced.flush
        self._before_tick(self._live or flushing)
        seconds, self._last_ns = (now_ns - self._last_ns) / 1e9, now_ns
        states, counts = self._sample(now_ns, self._live or flushing, names)
        states.update(self._self_report(lateness_ms))
        self._window.add(states, seconds)
        self._window.add(counts, seconds if self._live else window_s)
        self.ticks += 1
        if self._live:
            self.send("live", states | counts, seconds=seconds)
        if flushing:
            self._flushed_ns = now_ns
            self._flush(window_s, names)
        done_ns = perf_counter_ns()
        self._tick_ms = (done_ns - now_ns) / 1e6
        if self.log is not None:
            self.log.add("tick", now_ns, done_ns)
        self.cpu_s = time.thread_time()

    def _sample(
        self, now_ns: int, everything: bool, names: Collection[str] | None
    ) -> tuple[dict[str, float], dict[str, float]]:
        """States and counts; without a screen the counts keep until the flush, which costs less."""
        states: dict[str, float] = {}
        counts: dict[str, float] = {}
        for collector in self._collectors:
            if not collector.on or (names is not None and collector.name not in names):
                continue
            if collector.fresh:
                self._ask(collector, partial(collector.begin, now_ns))
            elif everything or collector.every_tick:
                values = self._ask(collector, partial(collector.sample, now_ns))
                (states if collector.every_tick else counts).update(values)
            else:
                self._ask(collector, collector.gather)
        return states, counts

    def _ask(self, collector: Collector, question: Callable[[], dict[str, float]]) -> dict[str, float]:
        started_ns = time.thread_time_ns()
        try:
            return numbers(question())
        except Exception as error:
            self._fail(collector, error)
            return {}
        finally:
            collector.cpu_ns += time.thread_time_ns() - started_ns

    def _flush(self, seconds: float, names: Collection[str] | None) -> None:
        values = self._window.take()
        for collector in self._collectors:
            if collector.on and (names is None or collector.name in names):
                values.update(self._ask(collector, collector.flush))
        self.flushes += 1
        self.run_window.add(values, seconds)
        self.send("metrics", values, seconds=seconds)

    def _self_report(self, lateness_ms: float) -> dict[str, float]:
        before, now = self._before, self._totals()
        self._before = now
        values = {
            "monitor/lateness_ms": max(0.0, lateness_ms),
            "monitor/dropped": float(now.rows_dropped - before.rows_dropped),
            "monitor/spans_dropped": float(now.spans_dropped - before.spans_dropped),
            "monitor/cpu_s": now.cpu_s - before.cpu_s,
        }
        if self.ticks:
            values["monitor/tick_ms"] = self._tick_ms
        return values


def numbers(values: dict[str, float]) -> dict[str, float]:
    """The values, which must be host numbers: whoever formats a tensor later waits for its device, in the
    thread of a sink.

    Raises:
        TypeError: naming the first key whose value is none.
    """
    for key, value in values.items():
        if not isinstance(value, (int, float)):
            raise TypeError(f"{key} is a {type(value).__name__}; a metric's value is a host number")
    return values


def _nothing() -> None:
    pass
