"""Progress that speaks up only when work takes long."""

from __future__ import annotations

import sys
import time
from datetime import timedelta


class Progress:
    """`with Progress("Tokenising", total) as progress: progress.advance(n)`: silent until two seconds have
    passed.

    On a terminal a bar of rich; elsewhere (CI logs) a plain line on stderr every ten seconds.

    Args:
        done: how much was done before; it counts as done, but says nothing of the speed.
    """

    quiet_s = 2.0
    plain_every_s = 10.0
    share_of_a_guess = 0.01
    """The time left is told once so much is done: before, it would be a guess."""

    def __init__(self, what: str, total: int | None = None, unit: str = "", done: int = 0) -> None:
        self.what = what
        self.total = total
        self.unit = f" {unit}" if unit else ""
        self.done = self._before = done
        self._start = time.monotonic()
        self._next = self._start + self.quiet_s
        self._bar: object = None
        self._task: object = None

    def __enter__(self) -> Progress:
        return self

    def advance(self, count: int = 1) -> None:
        """Count `count` more as done; draws at most a few times a second."""
        self.done += count
        now = time.monotonic()
        if now < self._next:
            return
        if sys.stderr.isatty():
            self._next = now + 0.2
            self._draw()
        else:
            self._next = now + self.plain_every_s
            print(self._line(now), file=sys.stderr, flush=True)

    def _line(self, now: float) -> str:
        seconds = now - self._start
        if not self.total:
            return f"{self.what}: {self.done:,}{self.unit} in {_clock(seconds)}"
        text = f"{self.what}: {self.done:,} of {self.total:,}{self.unit}, {_clock(seconds)}"
        new = self.done - self._before
        if new < self.share_of_a_guess * self.total:
            return text
        return f"{text}, about {_clock(seconds * (self.total - self.done) / new)} left"

    def _draw(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bar

        if self._bar is None:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self.what, total=self.total, completed=self._before)
        assert isinstance(self._bar, Bar)
        self._bar.update(self._task, completed=self.done)  # type: ignore[arg-type]

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()  # type: ignore[attr-defined]


def _clock(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else str(timedelta(seconds=round(seconds)))
