"""A clock that stands still until a test moves it, in the place of every clock that our code reads."""

from __future__ import annotations

import sys
import threading
import time
from types import ModuleType
from typing import Any

import pytest

PACKAGES = ("steptime", "dflash", "bench")
SECONDS = ("perf_counter", "monotonic", "thread_time", "process_time")


class Clock:
    """Tells the time that the test has made it.

    Args:
        step_ns: it moves on by so much after each reading, for code that waits by looking at the clock.

    Attributes:
        now_ns: what it shows; not 0 at first, which is "no wait in progress" to many counters.
        readings: how often it was read.
    """

    def __init__(self, step_ns: int = 0) -> None:
        self.now_ns = 10**9
        self.step_ns = step_ns
        self.readings = 0
        self._lock = threading.Lock()

    def ns(self) -> int:
        with self._lock:
            self.readings += 1
            now_ns = self.now_ns
            self.now_ns += self.step_ns
            return now_ns

    def seconds(self) -> float:
        return self.ns() / 1e9

    def advance(self, seconds: float) -> None:
        with self._lock:
            self.now_ns += round(seconds * 1e9)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the place of the clocks of every module of ours that is loaded; Python's own and torch's stay.

        The module `time` itself is left alone: a library that is first imported meanwhile would keep this
        clock."""
        names = dict.fromkeys(SECONDS, self.seconds) | {f"{name}_ns": self.ns for name in SECONDS}
        shown: Any = ModuleType("time")
        shown.__dict__.update({**vars(time), **names})
        for module in [one for name, one in sys.modules.items() if name.partition(".")[0] in PACKAGES]:
            for name, value in list(vars(module).items()):
                if value is time:
                    monkeypatch.setattr(module, name, shown)
                elif name in names and value is getattr(time, name):
                    monkeypatch.setattr(module, name, names[name])
