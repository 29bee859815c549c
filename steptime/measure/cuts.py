"""Several runs cut from one session of a resident subject: where one would have stopped, the next begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from steptime.measure.conductor import OVERTIME, Judge, Look
from steptime.records.pairs import Pair


@dataclass(frozen=True, slots=True)
class Cut:
    """One run of a session: its pairs are `[first, last)`; `stopped` as in `Measured`."""

    first: int
    last: int
    minutes: float
    stopped: str


@dataclass(slots=True)
class Cuts:
    """A judge that goes on after each run, until another one does not fit.

    Args:
        session_s: most time of all runs together.
        run_s: most time of each.

    Attributes:
        judge: of one run; `restart` makes it forget the one before. Both are set by `measure`.
        runs: those that came to their end.
    """

    session_s: float
    run_s: float
    judge: Judge | None = None
    restart: Callable[[], None] = lambda: None
    runs: list[Cut] = field(default_factory=list)
    _began_s: float = 0.0
    _longest_s: float = 0.0

    def look(self, pairs: Sequence[Pair], elapsed_s: float, time_s: float) -> Look:
        assert self.judge is not None
        first = self.runs[-1].last if self.runs else 0
        spent_s = elapsed_s - self._began_s
        look = self.judge.look(pairs[first:], spent_s, self.run_s)
        if look.stop or spent_s > OVERTIME * self.run_s:
            self.runs.append(Cut(first, len(pairs), spent_s / 60.0, look.why or "time"))
            self._longest_s, self._began_s = max(self._longest_s, spent_s), elapsed_s
            self.restart()
            return Look(elapsed_s + self._longest_s > self.session_s, "time")
        return Look(False)
