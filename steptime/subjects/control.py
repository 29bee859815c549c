"""The control's loss of time, measured where it is lost."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Final

from steptime.statistics.control import CONTROL_PERCENT

SHARE: Final = CONTROL_PERCENT / 100.0
_BLOCK: Final = bytes(4096)


def keep_busy(nanoseconds: int) -> int:
    """Keep a core busy for so long; the interpreter's lock is held for microseconds at a time only.

    Returns the nanoseconds that it took.
    """
    began_ns = time.perf_counter_ns()
    while time.perf_counter_ns() - began_ns < nanoseconds:
        hashlib.sha256(_BLOCK)
    return time.perf_counter_ns() - began_ns


class ControlLoss:
    """What one thread loses while the control is on. One writer, the thread itself; read while it stands.

    Args:
        lose: loses so many nanoseconds, and returns those that it took; a simulated clock brings its own.
    """

    def __init__(self, lose: Callable[[int], int] = keep_busy) -> None:
        self._lose = lose
        self._lost_ns = 0

    def pay(self, worked_ns: float) -> None:
        """Lose as much beside `worked_ns` of a step as makes the control's share of the whole."""
        self.lose(worked_ns * SHARE / (1.0 - SHARE))

    def lose(self, nanoseconds: float) -> None:
        """Lose so many nanoseconds."""
        self._lost_ns += self._lose(int(nanoseconds))

    def take_s(self) -> float:
        """Seconds lost since it was last asked."""
        lost_ns, self._lost_ns = self._lost_ns, 0
        return lost_ns * 1e-9
