"""Switches of the real trainer that lose a known time, each in its true thread."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from bench.syncs.faults.planted import held_length, hold_lock
from dflash.observe.collectors.base import Collector, Sources
from dflash.observe.metric import Metric
from dflash.observe.recorder import Instrument, WorkerRecorder
from dflash.observe.sinks.base import Row, Sink
from steptime.subjects.injection import Injection, Place

DELAY_S = 1.0
"""Between a tick and the work of `thread` that it starts."""
_BLOCK = bytes(65536)


def work(seconds: float) -> None:
    """Python code that fights the workers for the interpreter's lock, for so much CPU time of this thread: on
    a machine with other work, seconds that pass while it does not run cost nobody anything."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Loss(Instrument):
    """At a worker's step boundary: a share of the time that the worker's own work took.

    On the CPU that is the CPU time of its thread, spent anew without the interpreter's lock. On a GPU its
    stream sleeps for a share of the time in which its turn comes round, which the slowest stage fills.

    Attributes:
        owner: the worker, `drafter/0`.
        active: its switch; the instrument itself stays on, so that it knows where the work began.
        turn_ns: time between two of the worker's boundaries, on a GPU.
        paid_ns: time lost so far.
    """

    on = True

    def __init__(self, share: float, recorder: WorkerRecorder) -> None:
        self.factor = share / (1.0 - share)
        self.role, self.owner = recorder.role, recorder.label
        self.active = False
        self.turn_ns = 0.0
        self.paid_ns = 0
        self._worked_ns = -1
        self._sleep: Any = None
        if recorder.device.is_cuda:
            from bench.subjects.trainer.harness import GpuDelay

            self._sleep = GpuDelay(recorder.device)

    def run(self) -> None:
        """In the worker's thread."""
        if self._sleep is not None:
            self._sleep.calibrate()
            if self.active:
                self._sleep(int(self.turn_ns * self.factor))
            return
        now_ns = time.thread_time_ns()
        if self.active and self._worked_ns >= 0:
            owed_ns = int((now_ns - self._worked_ns) * self.factor)
            end_ns = now_ns + owed_ns
            while time.thread_time_ns() < end_ns - 100_000:
                hashlib.sha256(_BLOCK)
            while time.thread_time_ns() < end_ns:
                pass
            self.paid_ns += owed_ns
        self._worked_ns = time.thread_time_ns()

    def restart(self) -> None:
        """What the thread has done so far was no work of a step; in its own thread."""
        if self._sleep is None:
            self._worked_ns = time.thread_time_ns()


class Injected(Collector):
    """One `Injection` as a collector."""

    name: ClassVar[str] = "injected"
    metrics: ClassVar[tuple[Metric, ...]] = ()

    def __init__(self, sources: Sources, injection: Injection) -> None:
        super().__init__(sources)
        self.name = injection.name  # type: ignore[misc]
        self.layers = (injection.layer.value,)  # type: ignore[misc]
        self.injection = injection
        self.losses: list[Loss] = []
        seconds = self._seconds = injection.seconds(sources.config.tick_s, sources.config.flush_s)
        self._act: Callable[[], object] = lambda: work(seconds)
        self._later: Later | None = None
        if injection.place is Place.LOCK:
            length = held_length(seconds)
            self._act = lambda: hold_lock(length)
        elif injection.place is Place.THREAD:
            self._later = Later(lambda: work(seconds))
            self._act = self._later.start

    def equip(self, recorder: WorkerRecorder) -> None:
        roles = {Place.STEP: ("target", "drafter"), Place.TARGET: ("target",)}.get(self.injection.place, ())
        if recorder.role in roles:
            self.losses.append(Loss(self.injection.percent / 100.0, recorder))
            recorder.hang(self.name, self.losses[-1])

    def throw(self, on: bool) -> None:
        for loss in self.losses:
            loss.active = on

    def set_turns(self, step_s: float, per_step: int) -> None:
        """Say how long a step takes, for losses on a GPU."""
        targets = sum(loss.role == "target" for loss in self.losses)
        for loss in self.losses:
            loss.turn_ns = step_s * 1e9 * (targets / per_step if loss.role == "target" else 1.0)

    def sample(self, now_ns: int) -> dict[str, float]:
        """The monitor's tick."""
        if self.layers == ("tick",):
            self._act()
        return {}

    def flush(self) -> dict[str, float]:
        """The monitor's flush; the sink finds in the row what it is to lose."""
        if self.injection.place is Place.FLUSH:
            self._act()
        return {self.name: self._seconds} if self.injection.place is Place.SINK else {}

    def idle(self) -> bool:
        return self._later is None or not self._later.pending

    def close(self) -> None:
        if self._later is not None:
            self._later.close()


class Later:
    """A thread that works `DELAY_S` after it was told to."""

    def __init__(self, work: Callable[[], object], delay_s: float = DELAY_S) -> None:
        self._work, self._delay_s = work, delay_s
        self._asked = self._done = 0  # one writer each
        self._wake, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="injected", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """Times that it was told to work and has not done it."""
        return self._asked - self._done

    def start(self) -> None:
        """Work later; when there is work waiting, do more of it then."""
        self._asked += 1
        self._wake.set()

    def close(self) -> None:
        self._over.set()
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            self._wake.wait()
            self._wake.clear()
            if self._over.wait(self._delay_s):
                return
            while self.pending:
                self._work()
                self._done += 1


class InjectedSink(Sink):
    """A sink that keeps its thread busy for as long as a flush's row says."""

    name = "injected"
    kinds = frozenset({"metrics"})

    def __init__(self, injections: Sequence[Injection]) -> None:
        self._names = [one.name for one in injections if one.place is Place.SINK]

    def write(self, rows: list[Row]) -> None:
        for row in rows:
            work(sum(row.values.get(name, 0.0) for name in self._names))
