"""What the observability itself takes: calls of the instruments times the cost of a call, and CPU time of its
threads.

It resolves far below the noise of a paired measurement; what it cannot see (the interpreter's lock, caches)
that one can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns

SHARED = "monitor"


@dataclass(frozen=True)
class Account:
    """One collector's cost while it was on, or the shared cost of monitor and sinks.

    Attributes:
        on_s: wall time during which it was on.
        calls: calls of its instruments, all workers together.
        call_ns: cost of one call, measured on this machine after the run.
        cpu_s: CPU time of its sampling.
    """

    name: str
    on_s: float
    calls: int
    call_ns: float
    cpu_s: float

    @property
    def seconds(self) -> float:
        return self.calls * self.call_ns / 1e9 + self.cpu_s

    @property
    def percent(self) -> float:
        """Share of the wall time. All workers' calls are charged as if to one: an upper bound when there are
        several."""
        return 100.0 * self.seconds / self.on_s if self.on_s > 0 else 0.0


def cost_ns(call: Callable[[], object], calls: int = 2000, repeats: int = 7) -> float:
    """Nanoseconds that a call takes: median over repeats of the mean of a loop, the loop's own cost taken
    off."""
    return max(0.0, _loop_ns(call, calls, repeats) - _loop_ns(_nothing, calls, repeats))


def _loop_ns(call: Callable[[], object], calls: int, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = perf_counter_ns()
        for _ in range(calls):
            call()
        times.append((perf_counter_ns() - started) / calls)
    return median(times)


def _nothing() -> None:
    pass
