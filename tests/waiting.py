"""For tests of threads: wait for what must come, and no longer."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(true: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Look every millisecond until `true()`; AssertionError after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)
