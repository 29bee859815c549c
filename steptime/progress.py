"""Progress on stderr: what, how far, how long still. Nothing is drawn while a segment runs.

On a terminal one line is redrawn, elsewhere plain lines come at most every few seconds. There is no refresh
thread: the harness must not take time from what it measures, so a redraw happens only where the caller asks
for one."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

PLAIN_EVERY_S = 5.0


def human_time(seconds: float) -> str:
    """`45 s`, `3 min 20 s`."""
    whole = max(0, round(seconds))
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02d} s"


class Reporter:
    """Says lines, and shows how far a task of known length has come."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._console = Console(file=self._stream, highlight=False)
        self._quiet = quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last_line_s = float("-inf")

    def say(self, text: str) -> None:
        """One line."""
        if not self._quiet:
            self._console.print(text, markup=False, soft_wrap=True)

    def begin(self, what: str) -> None:
        """A task starts; its length is told with `advance`."""
        self._last_line_s = float("-inf")
        if self._quiet or not self._console.is_terminal:
            return
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[status]}")
        self._bar = Progress(*columns, console=self._console, auto_refresh=False, transient=True)
        self._bar.start()
        self._task = self._bar.add_task(what, total=1.0, status="")

    def advance(self, what: str, share: float, left_s: float) -> None:
        """The task is `share` (0..1) done and takes `left_s` seconds still, at most."""
        status = f"{100 * share:3.0f}%, at most {human_time(left_s)} to go"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=what, completed=min(1.0, share), status=status)
            self._bar.refresh()
        elif not self._quiet and time.monotonic() - self._last_line_s >= PLAIN_EVERY_S:
            self._last_line_s = time.monotonic()
            self._console.print(f"{what}: {status}", markup=False, soft_wrap=True)

    def end(self) -> None:
        """The task is over; its line goes away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None
