"""What a collector is, and what it may look at."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, ClassVar, Literal

from dflash.config import ObserveConfig
from dflash.observe.metric import Metric
from dflash.observe.recorder import WorkerRecorder
from dflash.observe.roles import Role, RoleMap
from dflash.observe.standing import Standing
from steptime.host_time import LockProbe

logger = logging.getLogger("dflash.observe")

Part = Literal["path", "tick", "flush"]
"""Where a collector may cost something."""

LOOK_S, LOOKS = 0.25, 100
"""Mean time between the first so many looks at the interpreter lock. A look costs some 100 us, so later the
monitor looks only when it wakes for a tick anyway."""


@dataclass
class Sources:
    """What collectors read: handed to each one; queue and prefetcher come when the trainer has made them.

    Attributes:
        report: says in one line that something went away.
        standing: for how long training has stood still on purpose.
        lock: with which the monitor waits, and so looks at the interpreter lock.
    """

    config: ObserveConfig
    roles: RoleMap
    recorders: list[WorkerRecorder] = field(default_factory=list)
    queue: Any = None
    prefetcher: Any = None
    report: Callable[[str], None] = logger.warning
    standing: Standing = field(default_factory=Standing)
    lock: LockProbe = field(default_factory=lambda: LockProbe(LOOK_S, LOOKS))

    def workers(self, role: Role) -> list[WorkerRecorder]:
        """Recorders of one role, by index."""
        return sorted((one for one in self.recorders if one.role == role), key=lambda one: one.index)


class Collector:
    """One family of metrics that can be switched on and off while training runs.

    `name`, `metrics` and `sample` make a collector. The other methods are for those that count from a switch
    on, have a part in the workers' paths, sum up over a flush window, or open something.

    `sample` runs in the monitor thread: it makes no CUDA call, does not wait, and reads what the workers
    wrote. A value that is not available is left out. An exception switches the collector off; nothing else
    stops.

    Attributes:
        layers: where it does something: in the workers' `path`, in a `tick` of the monitor, in a `flush`.
        every_tick: sampled at each tick. False: it reports counts only, which keep until the flush when no
            screen shows them.
        on: its switch.
        fresh: it has been switched on and not been asked yet.
        cpu_ns: CPU time that the monitor has spent in it.
    """

    name: ClassVar[str]
    metrics: ClassVar[tuple[Metric, ...]]
    every_tick: ClassVar[bool] = True
    layers: ClassVar[tuple[Part, ...]] = ("path", "tick", "flush")

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.on = False
        self.cpu_ns = 0
        self.fresh = True
        self._on_since_ns = 0
        self._on_ns = 0

    def switch(self, on: bool) -> None:
        """Throw the switch of the collector and of its instruments. Called under the observer's lock, from
        any thread."""
        now_ns = perf_counter_ns()
        if on and not self.on:
            self.fresh = True
            self._on_since_ns = now_ns
        elif self.on and not on:
            self._on_ns += now_ns - self._on_since_ns
        self.throw(on)
        self.on = on

    @classmethod
    def unavailable(cls) -> str:
        """Why it has nothing to report on this machine, in a few words for the doctor; empty when it has."""
        return ""

    def equip(self, recorder: WorkerRecorder) -> None:
        """Hang what runs at a new worker's step boundary into its recorder (`recorder.hang`)."""

    def on_s(self) -> float:
        """Wall time for which it has been on."""
        return (self._on_ns + (perf_counter_ns() - self._on_since_ns if self.on else 0)) / 1e9

    def throw(self, on: bool) -> None:
        """Switch the instruments in the workers' paths; also called when a new recorder or queue arrives."""

    def begin(self, now_ns: int) -> dict[str, float]:
        """First call after switching on: a reading to count from, of no use itself. The monitor's thread
        alone."""
        self.fresh = False
        self.reset()
        self.sample(now_ns)
        return {}

    def gather(self) -> dict[str, float]:
        """Called at a tick that does not sample: take what would not keep until the next one that does."""
        return {}

    def reset(self) -> None:
        """Forget what was counted before it was switched on."""

    def sample(self, now_ns: int) -> dict[str, float]:
        """Values since the last sample. `now_ns` is `perf_counter_ns` of the tick."""
        raise NotImplementedError

    def flush(self) -> dict[str, float]:
        """Values of the whole flush window that cannot be had from its ticks' values, e.g. quantiles."""
        return {}

    def stretch(self, share: float) -> dict[str, float]:
        """For a harness whose ticks come sooner than a run's: let `share` times as many events wait for the
        next sample as do now (those before them once more, or the last of them). Only where the work of a
        sample grows with them."""
        return {}

    def idle(self) -> bool:
        """Whether threads of its own have done all that the last tick asked of them. From any thread; never
        waits."""
        return True

    def instruments(self) -> tuple[int, float]:
        """Calls of its instruments so far, and the cost of one in nanoseconds, measured now: for the account,
        after the run."""
        return 0, 0.0

    def threads_cpu_s(self) -> float:
        """CPU time of threads of its own."""
        return 0.0

    def close(self) -> None:
        """Release what was opened."""
