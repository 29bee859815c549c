"""For tests of threads and processes: wait for what must come, and no longer."""

from __future__ import annotations

import time
from collections.abc import Callable

HANG_S = 300.0
"""A wait as long as this is a hang on any machine: a command that takes seconds has taken 128 s on two cores
that 17 processes shared. No test may pass or fail by a shorter one."""


def wait_until(true: Callable[[], object], timeout_s: float = HANG_S) -> None:
    """Look every millisecond until `true()`; AssertionError after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "did not come to pass"
        time.sleep(0.001)
