"""A bounded outbox and the thread that empties it into a sink: the monitor never waits for a file or a
server."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from dflash.observe.sinks.base import Sink
from dflash.observe.syncs import NO_SCOPES, Scopes

logger = logging.getLogger("dflash.observe")


class Outbox:
    """Rows for one sink, oldest first. When it is full the oldest row is dropped and counted."""

    def __init__(self, capacity: int) -> None:
        self._rows: deque[Any] = deque()
        self._capacity = capacity
        self._changed = threading.Condition()
        self._closed = self._waiting = False
        self.dropped = 0

    @property
    def idle(self) -> bool:
        """Whether the sink has written all rows and waits for more."""
        return self._waiting and not self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, *rows: Any) -> None:
        """Add rows; never waits for the sink."""
        with self._changed:
            self._rows.extend(rows)
            while len(self._rows) > self._capacity:
                self._rows.popleft()
                self.dropped += 1
            self._changed.notify_all()

    def take(self) -> list[Any] | None:
        """All rows, after waiting for at least one. None once closed and empty."""
        with self._changed:
            self._waiting = True
            self._changed.notify_all()
            while not self._rows and not self._closed:
                self._changed.wait()
            self._waiting = False
            if not self._rows:
                return None
            rows = list(self._rows)
            self._rows.clear()
            return rows

    def settle(self, timeout_s: float) -> bool:
        """Wait until the sink has written all rows; whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self.idle, timeout_s)

    def close(self) -> None:
        """No more rows will come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class SinkThread:
    """Owns one sink: opens it, writes to it and closes it, all in one thread of its own.

    A sink that raises is given up with one log line; its rows are then thrown away and counted as dropped.

    Attributes:
        cpu_s: CPU time this thread has used, seconds.
        scopes: entered by the thread as `role`; set before `start`.
    """

    def __init__(self, sink: Sink, capacity: int = 4096) -> None:
        self.sink = sink
        self.outbox = Outbox(capacity)
        self.cpu_s = 0.0
        self.failed: Exception | None = None
        self.scopes: Scopes = NO_SCOPES
        self._lost = 0
        self._troubled = False
        self._thread = threading.Thread(target=self._run, name=f"sink-{sink.name}", daemon=True)

    @property
    def role(self) -> str:
        """Who waits, when something in this thread waits for a device."""
        return f"sink/{self.sink.name}"

    @property
    def dropped(self) -> int:
        """Rows that did not reach the sink."""
        return self.outbox.dropped + self._lost

    @property
    def idle(self) -> bool:
        """Whether all rows are written, or the thread has ended."""
        return self.outbox.idle or (self._thread.ident is not None and not self._thread.is_alive())

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Let it write what waits and end; False when it did not within the time (it is left behind, a
        daemon)."""
        self.outbox.close()
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("%s: not finished after %.0f s, left behind", self.sink.name, timeout_s)
            return False
        return True

    def _run(self) -> None:
        with self.scopes.enter(self.role):
            self._loop()

    def _loop(self) -> None:
        self._guard(self.sink.open)
        while (rows := self.outbox.take()) is not None:
            if self.failed is not None or not self._guard(self.sink.write, rows):
                self._lost += len(rows)
            self.cpu_s = time.thread_time()
        self._guard(self.sink.close)
        self.cpu_s = time.thread_time()

    def _guard(self, call: Callable[..., None], *arguments: Any) -> bool:
        if self.failed is not None:
            return False
        try:
            call(*arguments)
        except Exception as error:
            self._told(error)
            return False
        return True

    def _told(self, error: Exception) -> None:
        """One line for each fault, not one for each row."""
        name = self.sink.name
        if not self.sink.retries:
            self.failed = error
            logger.warning("%s: given up: %s: %s", name, type(error).__name__, error)
        elif not self._troubled:
            logger.warning(
                "%s: rows are lost until it works again: %s: %s", name, type(error).__name__, error
            )
        self._troubled = True
