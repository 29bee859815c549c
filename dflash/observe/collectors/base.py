"""What a collector is, and what it may look at."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dflash.config import ObserveConfig
from dflash.observe.metric import Metric
from dflash.observe.recorder import WorkerRecorder
from dflash.observe.roles import Role, RoleMap

logger = logging.getLogger("dflash.observe")


@dataclass
class Sources:
    """What collectors read: handed to each one; queue and prefetcher come when the trainer has made them.

    Attributes:
        report: says in one line that something went away.
    """

    config: ObserveConfig
    roles: RoleMap
    recorders: list[WorkerRecorder] = field(default_factory=list)
    queue: Any = None
    prefetcher: Any = None
    report: Callable[[str], None] = logger.warning

    def workers(self, role: Role) -> list[WorkerRecorder]:
        """Recorders of one role, by index."""
        return sorted((one for one in self.recorders if one.role == role), key=lambda one: one.index)


class Collector:
    """One family of metrics that can be switched on and off while training runs.

    `sample` runs in the monitor thread: it makes no CUDA call, does not wait, and reads what the workers wrote. A value that
    is not available is left out. An exception switches the collector off; nothing else stops.
    """

    name: ClassVar[str]
    metrics: ClassVar[tuple[Metric, ...]]

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.on = False

    def switch(self, on: bool) -> None:
        """Throw the switch of the collector and of its instruments. Called under the observer's lock."""
        if on and not self.on:
            self.reset()
        self.throw(on)
        self.on = on

    def throw(self, on: bool) -> None:
        """Switch the instruments in the workers' paths; also called when a new recorder or queue arrives."""

    def reset(self) -> None:
        """Forget what was counted before: the first sample after switching on covers only the time since."""

    def sample(self, now_ns: int) -> dict[str, float]:
        """Values since the last sample. `now_ns` is `perf_counter_ns` of the tick."""
        raise NotImplementedError

    def flush(self) -> dict[str, float]:
        """Values of the whole flush window that cannot be had from its ticks' values, e.g. quantiles."""
        return {}

    def close(self) -> None:
        """Release what was opened."""
