"""What Python's threads take of the host: the CPU time of one thread, read by another, and the share of time
for which some thread holds the interpreter lock.

The share is sampled. A thread that wakes must take the lock. Where another one holds it, it waits a second
time, and Linux counts that as one more voluntary context switch of the waking thread. So each wake says
whether the lock was held at that moment. It is a count: a thread that wakes late because the cores are busy
is not mistaken for one that waits for the lock.

The error is that of a share of n independent moments, about 1/sqrt(n) at most; wakes closer together than a
step of the trainer depend on each other, so it is somewhat larger then. A holder whose thread the kernel has
taken off its core still holds the lock, and is counted: on a busy machine the share is above the holders' CPU
time."""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

try:
    import resource
except ImportError:  # no such module on Windows
    resource = None  # type: ignore[assignment]


class ThreadClock:
    """CPU time of one thread, for any thread to read. It costs that thread nothing while it works."""

    __slots__ = ("_clock", "_ended_ns")

    def __init__(self) -> None:
        self._clock: int | None = None
        self._ended_ns: int | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around everything that the thread does, in the thread itself: the clock of a thread that has ended
        may be another's."""
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            yield
        finally:
            self._ended_ns = time.thread_time_ns()
            self._clock = None

    def read_ns(self) -> int | None:
        """CPU time so far, nanoseconds; after its end, all of it. None before it began, and until its end
        where the system has no such clocks (macOS, Windows)."""
        clock = self._clock
        if clock is None:
            return self._ended_ns
        try:
            return time.clock_gettime_ns(clock)
        except OSError:  # it has just ended
            return self._ended_ns


@dataclass(frozen=True)
class HeldShare:
    """Of `wakes` looks at the interpreter lock, how many found it held."""

    held: int
    wakes: int

    @property
    def share(self) -> float:
        return self.held / self.wakes if self.wakes else math.nan

    @property
    def bounds(self) -> tuple[float, float]:
        """Wilson's 95% interval of the share."""
        if not self.wakes:
            return 0.0, 1.0
        z, n, p = 1.96, self.wakes, self.share
        middle = p + z * z / (2 * n)
        spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        low, high = (middle - spread) / (1 + z * z / n), (middle + spread) / (1 + z * z / n)
        return max(0.0, low), min(1.0, high)


def waits_of_this_thread() -> int:
    """Voluntary context switches of the calling thread: how often it gave its core away to wait."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def lock_unseen() -> str:
    """Why the share of the lock cannot be sampled here, in a few words; empty when it can."""
    if resource is None or not hasattr(resource, "RUSAGE_THREAD"):
        return "the system does not count a thread's context switches; Linux does"
    before = waits_of_this_thread()
    time.sleep(1e-3)
    return "" if waits_of_this_thread() > before else "the kernel does not count a thread's waits"


class LockProbe:
    """Looks at the interpreter lock each time that its thread wakes from a wait of random length.

    Args:
        mean_s: mean length of a wait; lengths are uniform up to twice that, so that no step keeps pace. It
            must be long against the time for which a thread keeps the lock, 5 ms where others want it: a look
            that finds it held ends with it, and shorter waits would look again just behind it.
        short: so many looks come as soon as that; later waits are as long as they may be.
        switches: what counts the thread's waits; a test's own.

    Attributes:
        on: its switch, for whoever waits with it.
        held, wakes: cumulative; written by the waiting thread alone.
        cpu_ns: CPU time of that thread while it waited, which is what waking costs; cumulative.
    """

    def __init__(
        self,
        mean_s: float = 0.02,
        short: float = math.inf,
        *,
        seed: int = 0,
        switches: Callable[[], int] = waits_of_this_thread,
    ) -> None:
        self.on = False
        self.held = self.wakes = self.cpu_ns = 0
        self._mean_s, self._short = mean_s, short
        self._random, self._switches = random.Random(seed), switches

    def wait(self, wait: Callable[[float], object], at_most_s: float = math.inf) -> bool:
        """One wait and one look.

        Args:
            wait: waits for so many seconds, once; true when something else woke it, which is no look.

        Returns:
            What `wait` told.
        """
        seconds = at_most_s
        if self.wakes < self._short:
            seconds = min(at_most_s, self._random.uniform(0.0, 2.0 * self._mean_s))
        began_ns, before = time.thread_time_ns(), self._switches()
        told = bool(wait(seconds))
        waits = self._switches() - before
        if waits and not told:  # a wait too short to give the core away has not looked
            self.wakes += 1
            self.held += waits > 1
        self.cpu_ns += time.thread_time_ns() - began_ns
        return told

    @property
    def found(self) -> HeldShare:
        return HeldShare(self.held, self.wakes)


def held_share(looks: int, mean_s: float = 0.02, wait: Callable[[float], object] = time.sleep) -> HeldShare:
    """The share of time for which other threads hold the lock, from `looks` looks of the calling thread."""
    probe = LockProbe(mean_s)
    for _ in range(looks):
        probe.wait(wait)
    return probe.found
