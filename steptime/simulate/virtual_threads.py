"""Threads on a clock of their own: one runs at a time, and time passes only where a thread says so.

Code that waits with `threading`'s conditions and barriers runs unchanged: its module is given `threading` of
a `VirtualTime` in place of Python's. The same program takes the same turns every time, and an hour of sleeps
takes no longer than the work between them.

Left out: a thread is never interrupted between two waits, so locks are never contended; and who is woken
first goes on first."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class Stuck(RuntimeError):
    """Every thread waits for another one."""


class _Task:
    """A thread and the lock that lets it go on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.turn = threading.Semaphore(0)
        self.waits = False


class VirtualTime:
    """A clock, and the threads that live by it. `run` returns when all have ended.

    Attributes:
        now_s: what the clock shows.
        threading: stands for the module in code that is to live by this clock: `Lock`, `Condition`,
            `Barrier`, `Thread`.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.threading: Any = SimpleNamespace(
            Lock=lambda: _NoLock(),
            Condition=lambda lock=None: _Condition(self),
            Barrier=lambda parties: _Barrier(self, parties),
            BrokenBarrierError=threading.BrokenBarrierError,
            Thread=lambda target, name="", daemon=True: _Thread(self, target, name),
            current_thread=threading.current_thread,
        )
        self._due: list[tuple[float, int, _Task]] = []
        self._numbers = itertools.count()
        self._here = threading.local()
        self._alive: list[_Task] = []
        self._over = threading.Event()
        self._error: BaseException | None = None

    def spawn(self, name: str, body: Callable[[], object]) -> None:
        """A thread that begins now, behind those that are due now."""
        task = _Task(name)

        def live() -> None:
            self._here.task = task
            task.turn.acquire()
            try:
                if self._error is None:
                    body()
            except BaseException as error:
                self._error = self._error or error
            self._alive.remove(task)
            self._next()

        self._alive.append(task)
        self._schedule(task, self.now_s)
        threading.Thread(target=live, name=name, daemon=True).start()

    def run(self) -> None:
        """Let the threads live until all have ended.

        Raises:
            Stuck: all that are left wait for one another.
            Exception: what the first failing thread raised; the others are left where they wait.
        """
        self._next()
        self._over.wait()
        if self._error is not None:
            raise self._error

    def sleep(self, seconds: float) -> None:
        """The calling thread goes on when so much time has passed."""
        task = self._here.task
        self._schedule(task, self.now_s + max(0.0, seconds))
        self._give_way(task)

    def park(self) -> _Task:
        """The calling thread goes on when somebody calls `unpark` with what this is about to wait as."""
        task: _Task = self._here.task
        task.waits = True
        self._give_way(task)
        return task

    def unpark(self, task: _Task) -> None:
        """A thread that is parked goes on now, behind those that are due now."""
        if task.waits:
            task.waits = False
            self._schedule(task, self.now_s)

    @property
    def task(self) -> _Task:
        """The calling thread."""
        task: _Task = self._here.task
        return task

    def _schedule(self, task: _Task, when_s: float) -> None:
        heapq.heappush(self._due, (when_s, next(self._numbers), task))

    def _give_way(self, task: _Task) -> None:
        self._next()
        task.turn.acquire()

    def _next(self) -> None:
        """Let the next thread go on; nobody else runs when this is called."""
        if self._error is None and self._due:
            self.now_s, _, task = heapq.heappop(self._due)
            task.turn.release()
            return
        if self._error is None and self._alive:
            names = ", ".join(task.name for task in self._alive)
            self._error = Stuck(f"nobody can go on at {self.now_s:.3f} s; these wait: {names}")
        self._over.set()


class _NoLock:
    """A lock among threads that never meet."""

    def __enter__(self) -> _NoLock:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class _Condition(_NoLock):
    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._waiters: deque[_Task] = deque()

    def wait(self) -> None:
        self._waiters.append(self._time.task)
        self._time.park()

    def notify(self) -> None:
        if self._waiters:
            self._time.unpark(self._waiters.popleft())

    def notify_all(self) -> None:
        while self._waiters:
            self.notify()


class _Barrier:
    def __init__(self, time: VirtualTime, parties: int) -> None:
        self._met = _Condition(time)
        self._parties, self._here, self._broken = parties, 0, False

    def wait(self) -> None:
        if not self._broken:
            self._here += 1
            if self._here == self._parties:
                self._here = 0
                self._met.notify_all()
            else:
                self._met.wait()
        if self._broken:
            raise threading.BrokenBarrierError

    def abort(self) -> None:
        self._broken = True
        self._met.notify_all()


class _Thread:
    """What code makes of `threading.Thread`."""

    ident = None

    def __init__(self, time: VirtualTime, target: Callable[[], object], name: str) -> None:
        self._time, self._target, self.name = time, target, name

    def start(self) -> None:
        self._time.spawn(self.name, self._target)
