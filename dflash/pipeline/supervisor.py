"""The life of a run's threads: start, first failure wins, stop for all, join within a deadline."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from dflash.ranks.watch import RankFailed


@dataclass(frozen=True)
class Failure:
    """The first exception of a run and the worker that raised it."""

    role: str
    error: BaseException

    def line(self) -> str:
        """Who and what, in one line."""
        what = str(self.error).partition("\n")[0]
        if isinstance(self.error, RankFailed):  # it names somebody else
            return what
        return f"{self.role} failed: {type(self.error).__name__}: {what}"

    def text(self) -> str:
        """The worker's own traceback."""
        return "".join(traceback.format_exception(self.error))


class WorkerFailed(RuntimeError):
    """A worker raised; the cause is its exception."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.line())
        self.failure = failure


class Supervisor:
    """Owns the worker threads. `fail` and `stop` may be called from any thread; the rest from the owner."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self.failure: Failure | None = None
        self._threads: list[threading.Thread] = []
        self._wakers: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def on_stop(self, wake: Callable[[], None]) -> None:
        """Call `wake` when the run stops; it must end every wait of the part that registers it."""
        self._wakers.append(wake)

    def spawn(self, role: str, body: Callable[[], None]) -> None:
        """Start a worker thread; an exception in `body` fails the run."""

        def run() -> None:
            try:
                body()
            except BaseException as error:
                self.fail(role, error)

        thread = threading.Thread(target=run, name=role, daemon=True)
        self._threads.append(thread)
        thread.start()

    def fail(self, role: str, error: BaseException) -> None:
        """Keep the first failure and stop everybody."""
        with self._lock:
            if self.failure is None:
                self.failure = Failure(role, error)
        self.stop()

    def stop(self) -> None:
        """Ask every worker to end; those that wait are woken."""
        self.stopping.set()
        for wake in self._wakers:
            wake()

    def running(self, prefix: str) -> bool:
        """Whether a worker whose role starts with `prefix` still runs."""
        return any(thread.name.startswith(prefix) and thread.is_alive() for thread in self._threads)

    def threads(self) -> dict[str, threading.Thread]:
        """The workers' threads by role."""
        return {thread.name: thread for thread in self._threads}

    def join(self, timeout_s: float, but: str = "") -> list[str]:
        """Wait for every worker, each for `timeout_s` of its own; the names of those still running, each with
        its stack on stderr. Nobody waits for `but`."""
        for thread in self._threads:
            if thread.name != but:
                thread.join(timeout_s)
        left = [thread for thread in self._threads if thread.is_alive()]
        frames = sys._current_frames()
        for thread in left:
            frame = frames.get(thread.ident or 0)
            stack = "".join(traceback.format_stack(frame)) if frame else "no stack\n"
            sys.stderr.write(f"worker {thread.name} did not stop within {timeout_s:.0f} s; it is at\n{stack}")
        return [thread.name for thread in left]

    def raise_failure(self) -> None:
        """Raise `WorkerFailed` from the first failure, if there was one."""
        if self.failure is not None:
            raise WorkerFailed(self.failure) from self.failure.error
