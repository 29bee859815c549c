"""The part of `workers` that is about the host: CPU time of each thread and of the process, and the share of
time for which the interpreter lock is held."""

from __future__ import annotations

from time import process_time_ns

from dflash.observe.collectors.base import Sources
from dflash.observe.metric import Metric
from steptime.host_time import lock_unseen

_CLOCKS = "the threads' CPU clocks, read by the monitor; Linux only, elsewhere a thread's at its end"
_LOCK = "the monitor's wakes, see `steptime/host_time.py`; Linux only"

WORKER_HOST = Metric(
    "{role}/{i}/host_s",
    "s",
    "delta",
    "CPU time of the worker's own thread. On the CPU that is its matrix products too; on CUDA what it takes "
    "to enqueue, without backward's, which autograd enqueues from a thread of its own (see `host/process_s`)",
    _CLOCKS,
)
STANDING = "host/standing_s"
METRICS = (
    Metric(
        STANDING,
        "s",
        "delta",
        "time that training stood still for looks at the held-out loss and at tau; `mfu` and the bottleneck "
        "leave it out; absent where it did not",
        "drafter 0's thread; on a GPU the held-out loss counts with its host time alone",
    ),
    Metric(
        "host/process_s",
        "s",
        "delta",
        "CPU time of all threads of the process: workers, autograd, prefetcher, checkpoints, monitor, sinks",
        "the process's CPU clock",
    ),
    Metric("host/prefetcher_s", "s", "delta", "CPU time of the prefetcher's thread", _CLOCKS),
    Metric(
        "host/lock_wakes",
        "1",
        "delta",
        "times that the monitor woke and looked whether another thread held the interpreter lock: the first "
        "100 some four a second, then one a tick; none while a harness holds its clock",
        _LOCK,
    ),
    Metric(
        "host/lock_held_ratio",
        "1",
        "ratio",
        "share of those times at which it was held; after n looks the error is below 1/sqrt(n) (95%)",
        _LOCK,
        weight="host/lock_wakes",
    ),
)


class HostTime:
    """Deltas of the host's clocks and of the lock's looks. Used by the collector in the monitor's thread."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._unseen: str | None = None
        self._before: dict[str, int] = {}

    def throw(self, on: bool) -> None:
        """The monitor looks at the lock while it is on, where it can be seen."""
        if on and self._unseen is None:
            self._unseen = lock_unseen()
        self._sources.lock.on = on and not self._unseen

    def reset(self) -> None:
        """Forget what was counted before."""
        self._before.clear()

    def take_cpu_ns(self) -> int:
        """What the looks have cost since the last call."""
        return self.since("looks", self._sources.lock.cpu_ns) or 0

    def sample(self) -> dict[str, float]:
        """What came since the last sample; a clock that is not there is left out."""
        values: dict[str, float] = {}
        self._seconds(values, "host/process_s", process_time_ns())
        for one in self._sources.workers("prefetcher"):
            self._seconds(values, "host/prefetcher_s", one.clock.read_ns())
        for role in ("target", "drafter"):
            for one in self._sources.workers(role):
                self._seconds(values, f"{one.label}/host_s", one.clock.read_ns())
        lock = self._sources.lock
        held, wakes = self.since("held", lock.held), self.since("wakes", lock.wakes)
        if wakes:
            values["host/lock_wakes"] = float(wakes)
            values["host/lock_held_ratio"] = (held or 0) / wakes
        return values

    def _seconds(self, values: dict[str, float], key: str, now_ns: int | None) -> None:
        """A thread that is still to begin counts from 0."""
        if now_ns is None:
            self._before.setdefault(key, 0)
            return
        delta = self.since(key, now_ns)
        if delta is not None:
            values[key] = delta / 1e9

    def since(self, name: str, now: int) -> int | None:
        """What `name` has grown by since the last call; None at the first."""
        before, self._before[name] = self._before.get(name), now
        return None if before is None else now - before
