"""The monitor: one thread that samples the collectors, and hands rows to the sinks' outboxes. It makes no
CUDA call."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import Any

from dflash.observe.collectors.base import Collector
from dflash.observe.metric import Metric
from dflash.observe.outbox import SinkThread
from dflash.observe.sinks.base import Row, RowKind
from dflash.observe.syncs import NO_SCOPES, Scopes
from dflash.observe.window import FlushWindow

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


class Monitor:
    """Ticks every `tick_s`, flushes every `flush_s`. Nothing that goes wrong in here reaches the training
    threads.

    Args:
        collectors: asked in turn; one that raises is switched off through `fail`.
        sinks: rows go to the outbox of each sink that wants their kind.
        before_tick: moves what other threads left for the monitor (late scalars, workers' faults). Told
            whether anybody sees this tick: a screen is on, or a flush is due.
        totals: drops and CPU time up to now.
        step: drafter 0's optimizer step.
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
    ) -> None:
        self._collectors, self._sinks = collectors, sinks
        self._tick_s, self._flush_s = tick_s, flush_s
        self._live = any("live" in sink.sink.kinds for sink in sinks)
        self._before_tick, self._fail, self._totals, self._step = before_tick, fail, totals, step
        self._window = FlushWindow(find)
        self.run_window = FlushWindow(find)
        self._started_ns = self._last_ns = self._flushed_ns = perf_counter_ns()
        self._before = Totals()
        self._tick_ms = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self.scopes: Scopes = NO_SCOPES
        self.cpu_s = 0.0
        self.ticks = 0
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
        self._stop.set()
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

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with self.scopes.enter("monitor"):
            self._loop()

    def _loop(self) -> None:
        due = time.perf_counter() + self._tick_s
        while not self._stop.wait(max(0.0, due - time.perf_counter())):
            woken = time.perf_counter()
            self._guarded_tick((woken - due) * 1e3)
            # After a stall go on from when it ended, and do not hurry through the ticks missed.
            due = max(due, woken - self._tick_s) + self._tick_s
        self._guarded_tick(0.0, last=True)

    def _guarded_tick(self, lateness_ms: float, last: bool = False) -> None:
        try:
            self.tick(lateness_ms, last)
        except Exception as error:
            if self.fault is None:
                logger.exception("monitor: a tick failed; training goes on")
            self.fault = error

    def tick(self, lateness_ms: float = 0.0, last: bool = False) -> None:
        """Sample every collector that is on; flush when it is time, or when this is the last tick."""
        now_ns = perf_counter_ns()
        window_s = (now_ns - self._flushed_ns) / 1e9
        flushing = last or window_s >= self._flush_s - self._tick_s / 2
        self._before_tick(self._live or flushing)
        seconds, self._last_ns = (now_ns - self._last_ns) / 1e9, now_ns
        states, counts = self._sample(now_ns, self._live or flushing)
        states.update(self._self_report(lateness_ms))
        self._window.add(states, seconds)
        self._window.add(counts, seconds if self._live else window_s)
        self.ticks += 1
        if self._live:
            self.send("live", states | counts, seconds=seconds)
        if flushing:
            self._flushed_ns = now_ns
            self._flush(window_s)
        self._tick_ms = (perf_counter_ns() - now_ns) / 1e6
        self.cpu_s = time.thread_time()

    def _sample(self, now_ns: int, everything: bool) -> tuple[dict[str, float], dict[str, float]]:
        """States and counts; without a screen the counts keep until the flush, which costs less."""
        states: dict[str, float] = {}
        counts: dict[str, float] = {}
        for collector in self._collectors:
            if not collector.on:
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

    def _flush(self, seconds: float) -> None:
        values = self._window.take()
        for collector in self._collectors:
            if collector.on:
                values.update(self._ask(collector, collector.flush))
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
