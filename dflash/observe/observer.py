"""The observability of one run: recorders for the workers, collectors, monitor, sinks."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash.config import ObserveConfig
from dflash.device import Device
from dflash.observe.accounting import SHARED, Account
from dflash.observe.bottleneck import find_bottleneck
from dflash.observe.collectors.base import Collector, Sources
from dflash.observe.metric import MetricIndex
from dflash.observe.monitor import Monitor, Totals
from dflash.observe.outbox import SinkThread
from dflash.observe.recorder import WorkerRecorder
from dflash.observe.registry import COLLECTORS, all_metrics, chosen_sinks, families
from dflash.observe.roles import Role, RoleMap
from dflash.observe.sinks.base import Sink, Surroundings
from dflash.observe.standing import Standing
from dflash.observe.syncs import Scopes
from dflash.observe.timeline.log import Timeline
from steptime.registry import unknown

logger = logging.getLogger("dflash.observe")
_LATE = 4096


@dataclass(frozen=True)
class Summary:
    """What a run's observability says at its end.

    Attributes:
        bottleneck: in words, over the whole run.
        values: every key over the whole run: sums of deltas, means of the rest.
        accounted_percent: share of the wall time that the observability took itself; see `accounting`.
        dropped: rows lost, by sink.
        failed: collectors that were switched off by an error, with the error.
    """

    elapsed_s: float
    ticks: int
    bottleneck: str
    values: dict[str, float] = field(default_factory=dict)
    accounted_percent: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class Observer:
    """Owned by the trainer. `recorder`, `attach`, `start`, `switch`, `late` and `close` are called from its
    threads.

    Args:
        run_dir: `metrics.jsonl` goes there.
        sinks: in place of those that the config asks for.
        timeline: gets the spans of every thread; None: nobody records any.
    """

    def __init__(
        self,
        config: ObserveConfig,
        run_dir: Path,
        roles: RoleMap,
        sinks: Sequence[Sink] | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        on = COLLECTORS.chosen(config.collectors)
        self.config, self.run_dir, self.roles = config, run_dir, roles
        self._sources = Sources(config, roles, report=self.event)
        self._collectors = [build(self._sources) for build in COLLECTORS]
        self._lock = threading.Lock()
        self._late: deque[tuple[int, dict[str, float]]] = deque(maxlen=_LATE)
        self._late_dropped = 0
        self._charges: list[Callable[[float], Account]] = []
        self._late_lock = threading.Lock()
        self._failed: dict[str, str] = {}
        self._sinks = [
            SinkThread(sink) for sink in (make_sinks(config, run_dir, roles) if sinks is None else sinks)
        ]
        self._started = False
        self._ended: Summary | None = None
        self._monitor = Monitor(
            self._collectors,
            self._sinks,
            tick_s=config.tick_s,
            flush_s=config.flush_s,
            before_tick=self._before_tick,
            fail=self._fail,
            find=MetricIndex(all_metrics()).find,
            totals=self._totals,
            step=self._step,
            lock=self._sources.lock,
        )
        self.timeline = timeline
        if timeline is not None:
            self._monitor.log = timeline.log("monitor")
            self.charge(timeline.account)
        for collector in on:
            self.switch(collector.name, True)

    # -- called while the trainer is built -------------------------------------------------------------------

    def recorder(self, role: Role, index: int, device: Device | None = None) -> WorkerRecorder:
        """The recorder of a worker; one for each."""
        recorder = WorkerRecorder(role, index, device or Device("cpu"), self.config.ring, self.timeline)
        with self._lock:
            for collector in self._collectors:
                collector.equip(recorder)
            self._sources.recorders.append(recorder)
        return recorder

    @property
    def recorders(self) -> tuple[WorkerRecorder, ...]:
        """The recorders made so far, in that order."""
        return tuple(self._sources.recorders)

    def attach(self, queue: Any = None, prefetcher: Any = None) -> None:
        """The shared queue and the prefetcher, for the collectors that read them. Throws all switches
        again."""
        if queue is not None:
            self._sources.queue = queue
        if prefetcher is not None:
            self._sources.prefetcher = prefetcher
        with self._lock:
            for collector in self._collectors:
                collector.throw(collector.on)

    def add(self, build: Callable[[Sources], Collector]) -> Collector:
        """A collector from outside the registry, switched off; before `start`."""
        collector = build(self._sources)
        for recorder in self._sources.recorders:
            collector.equip(recorder)
        self._collectors.append(collector)
        return collector

    def charge(self, account: Callable[[float], Account]) -> None:
        """Account for something else that observes, given the time since the start, seconds."""
        self._charges.append(account)

    def watch(self, scopes: Scopes) -> None:
        """Count or guard host syncs in the threads of the monitor and of the sinks too; before `start`."""
        self._monitor.scopes = scopes
        for sink in self._sinks:
            sink.scopes = scopes

    @property
    def standing(self) -> Standing:
        """Around a look for which training stands still; from drafter 0's thread."""
        return self._sources.standing

    @property
    def sink_roles(self) -> tuple[str, ...]:
        """As what the sinks' threads enter their scopes."""
        return tuple(sink.role for sink in self._sinks)

    # -- called while it runs --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the sinks' threads and the monitor."""
        if self._started:
            return
        self._started = True
        with self._lock:
            for collector in self._collectors:
                collector.throw(collector.on)
        for sink in self._sinks:
            sink.start()
        self._monitor.send(
            "run", {"targets": list(self.roles.targets), "drafters": list(self.roles.drafters)}
        )
        self._monitor.start()

    def switch(self, collector: str, on: bool) -> None:
        """Switch a collector and its instruments, at any time, from any thread.

        Raises:
            UserError: no such collector.
        """
        if collector not in self.switches():
            raise unknown("collector", collector, self.switches())
        with self._lock:
            for one in self._collectors:
                if one.name == collector:
                    one.switch(on)

    def switches(self) -> dict[str, bool]:
        """Which collectors are on."""
        return {collector.name: collector.on for collector in self._collectors}

    # -- the monitor's clock in other hands, for a harness; from one thread at a time ------------------------

    def hold_clock(self) -> None:
        """No tick by time from now on, until `release_clock`; before `start` or later."""
        self._monitor.hold()

    def release_clock(self) -> None:
        """Ticks and flushes by time again."""
        self._monitor.release()

    def record(self, timeline: Timeline | None) -> None:
        """Log the spans of all workers from now on; None: no more. From one thread while all stand still. Not
        for a run with a timeline of its own."""
        for recorder in self._sources.recorders:
            recorder.record(timeline)

    def force_tick(self, sample: Collection[str] | None = None) -> None:
        """The monitor's thread does one whole tick now, without a flush; returns at once.

        Args:
            sample: the collectors that it asks, of those that are on; None: all.
        """
        self._monitor.force(sample, flush=False)

    def force_flush(self, sample: Collection[str] | None = None) -> None:
        """Likewise one tick with a flush, whose row goes to the sinks."""
        self._monitor.force(sample, flush=True)

    def discard(self, keep: Collection[str] = (), flush: bool = False, share: float = 1.0) -> None:
        """Prepare a forced tick, so that it does a tick's work whatever the one before it asked for.

        The monitor's thread sends what waits for the sinks; asks the collectors that the tick will not ask
        what the tick asks (of a flush too when `flush`), and throws the answers away; gives those their first
        reading that were just switched on. So between two forced ticks every collector is read once, and
        nothing heaps up.

        Args:
            keep: the collectors that the tick is going to ask.
            share: length of a run's tick over the time since the last forced one; see `Collector.stretch`.
        """
        self._monitor.discard(keep, flush, share)

    @property
    def flushes(self) -> int:
        """Flushes so far."""
        return self._monitor.flushes

    @property
    def monitor_fault(self) -> Exception | None:
        """What the first tick that failed as a whole raised."""
        return self._monitor.fault

    @property
    def idle(self) -> bool:
        """Whether monitor, collectors' threads and sinks have done all that they were asked for. Never
        waits."""
        # In the order in which one asks the next.
        return (
            self._monitor.idle
            and all(collector.idle() for collector in self._collectors)
            and all(sink.idle for sink in self._sinks)
        )

    def late(self, step: int, values: dict[str, float]) -> None:
        """Training scalars of `step`, host numbers. Never waits."""
        if len(self._late) == _LATE:
            self._late_dropped += 1
        self._late.append((step, values))

    def event(self, text: str, **values: Any) -> None:
        """A line for the log and the sinks, with what a program may want of it."""
        logger.warning("%s", text)
        self._monitor.send("event", {"text": text, **values})

    def from_rank(self, rank: int, kind: str, step: int, values: dict[str, Any], seconds: float) -> None:
        """A row of another rank's observer, for this one's sinks: its keys begin with `rank1/` here."""
        if kind == "event":
            self._monitor.send("event", values | {"text": f"rank {rank}: {values.get('text')}"}, step)
        else:
            named = {f"rank{rank}/{key}": value for key, value in values.items()}
            self._monitor.send("rank", named, step, seconds)

    def settle(self, timeout_s: float) -> None:
        """Wait until metrics.jsonl and the like hold every row sent so far; not from a worker's thread."""
        self._before_tick(True)
        for sink in self._sinks:
            if sink.sink.settles:
                sink.outbox.settle(timeout_s)

    def accounts(self) -> list[Account]:
        """What each collector has cost, and the shared cost of monitor and sinks; costs of a call are
        measured now."""
        elapsed_s = self._monitor.elapsed_s
        accounts = []
        for collector in self._collectors:
            calls, call_ns = collector.instruments()
            cpu_s = collector.cpu_ns / 1e9 + collector.threads_cpu_s()
            accounts.append(Account(collector.name, collector.on_s(), calls, call_ns, cpu_s))
        shared_s = self._monitor.cpu_s - sum(collector.cpu_ns for collector in self._collectors) / 1e9
        shared_s += sum(sink.cpu_s for sink in self._sinks)
        accounts += [account(elapsed_s) for account in self._charges]
        return [*accounts, Account(SHARED, elapsed_s, 0, 0.0, max(0.0, shared_s))]

    def accounted_percent(self) -> dict[str, float]:
        """Share of the wall time that each collector took while it was on; `all`: all of them with monitor
        and sinks."""
        accounts = self.accounts()
        shares = {account.name: account.percent for account in accounts}
        return {**shares, "all": sum(shares.values())}

    def close(self) -> Summary:
        """Last tick, last flush, sinks closed within bounded time. May be called twice."""
        if self._started and self._ended is None:
            self._monitor.stop()
            self._ended = self._summarise()
            self._monitor.send("summary", dataclasses.asdict(self._ended))
            for sink in self._sinks:
                sink.outbox.close()
            for sink in self._sinks:
                sink.close(sink.sink.close_timeout_s)
            for collector in self._collectors:
                try:
                    collector.close()
                except Exception as error:
                    logger.warning(
                        "collector %s: closing failed: %s: %s", collector.name, type(error).__name__, error
                    )
        return self._ended or self._summarise()

    # -- called by the monitor -------------------------------------------------------------------------------

    def _before_tick(self, everything: bool) -> None:
        # Waking every sink each second for a few rows would cost as much as all collectors.
        if everything or len(self._late) > _LATE // 2:
            with self._late_lock:  # the monitor and `settle`; the rows keep their order
                late = [self._late.popleft() for _ in range(len(self._late))]
                if late:
                    self._monitor.send_train(late)
        for recorder in self._sources.recorders:
            fault, recorder.fault = recorder.fault, None
            if fault is not None:
                name, error = fault
                for collector in self._collectors:
                    if collector.name == name and collector.on:
                        self._fail(collector, error)

    def _fail(self, collector: Collector, error: Exception) -> None:
        with self._lock:
            try:
                collector.switch(False)
            except Exception:
                collector.on = False
                logger.debug("switching off %s failed too", collector.name, exc_info=True)
        self._failed[collector.name] = f"{type(error).__name__}: {error}"
        self.event(f"collector {collector.name} is off: {type(error).__name__}: {error}")

    def _totals(self) -> Totals:
        return Totals(
            rows_dropped=sum(sink.dropped for sink in self._sinks) + self._late_dropped,
            spans_dropped=sum(
                timer.dropped for one in self._sources.recorders for timer in one.timers.values()
            ),
            cpu_s=self._monitor.cpu_s + sum(sink.cpu_s for sink in self._sinks),
        )

    def _step(self) -> int:
        return next(
            (one.step for one in self._sources.recorders if one.role == "drafter" and one.index == 0), 0
        )

    def _summarise(self) -> Summary:
        values = self._monitor.run_window.take()
        elapsed_s = self._monitor.elapsed_s
        return Summary(
            elapsed_s=elapsed_s,
            ticks=self._monitor.ticks,
            bottleneck=find_bottleneck(values, elapsed_s).text,
            values=values,
            accounted_percent=self.accounted_percent(),
            dropped={sink.sink.name: sink.dropped for sink in self._sinks},
            failed=dict(self._failed),
        )


def make_sinks(config: ObserveConfig, run_dir: Path, roles: RoleMap) -> list[Sink]:
    """The sinks that the config asks for; JSONL always.

    Raises:
        UserError: no such sink, or one whose package is not installed.
    """
    on = COLLECTORS.chosen(config.collectors)
    sampled = families(metric for collector in on for metric in collector.metrics)
    run = Surroundings(config, run_dir, roles, families(all_metrics()), sampled)
    return [sink(run) for sink in chosen_sinks(config)]
