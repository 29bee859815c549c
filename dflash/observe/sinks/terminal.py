"""The terminal: one live screen, or plain lines where there is none."""

from __future__ import annotations

from typing import ClassVar

from rich.console import Console
from rich.live import Live

from dflash.observe.screen import Screen
from dflash.observe.sinks.base import Row, RowKind, Sink, Surroundings


class TerminalSink(Sink):
    """Draws the screen at each tick, or prints a line at each flush. Log lines of others appear above the
    screen.

    Args:
        run: its `observe.terminal`: `auto` is live on a terminal that can move its cursor, plain elsewhere.
        console: default: standard error.
    """

    name: ClassVar[str] = "terminal"
    switch: ClassVar[str] = "terminal"

    def __init__(self, run: Surroundings, console: Console | None = None) -> None:
        mode = run.config.terminal
        self._console = console or Console(stderr=True, highlight=False)
        self._live_wanted = mode == "live" or (
            mode == "auto" and self._console.is_terminal and not self._console.is_dumb_terminal
        )
        self.kinds: frozenset[RowKind] = frozenset(
            {"train", "live", "summary"} if self._live_wanted else {"train", "metrics", "summary"}
        )
        self._live: Live | None = None
        self._least_s = run.config.flush_s / 2
        self.screen = Screen(run.roles)

    def open(self) -> None:
        if self._live_wanted:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.start()

    def write(self, rows: list[Row]) -> None:
        rows = [row for row in rows if row.kind in self.kinds]
        for row in rows:
            self.screen.update(row)
        if self._live is not None:
            if any(row.kind != "train" for row in rows):
                self._live.update(self.screen.render(), refresh=True)
        # The rest of a window at the end of a run says little; the last line is that of the whole run.
        elif any(row.kind == "summary" or row.seconds >= self._least_s for row in rows):
            self._console.print(self.screen.line(), markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
