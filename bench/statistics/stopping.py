"""When to stop measuring: precision stopping on the intervals of the contrasts.

At a few looks (8, 12, 18, 27, ... rounds, each 1.5 times the last) the rule asks of every contrast that is
judged: is the half-width of its 90% interval at most a third of its budget? It stops when all say yes, when
the time is up, or when the last look is reached. Why this rule and not another:

- It looks at the spread and never at the sign or size of the effect, so a slowdown cannot be looked for until
  it shows: peeking with a significance test at every round costs 23% false alarms instead of 5. The looks are
  few because stopping on a spread that happens to be small makes intervals a little too short; `python -m
  bench.selfcheck.simulate` shows that at these looks bounds taken at 4% keep an error of 5%.
- A third, because then identical code is `within` in over 99.9 runs of 100, a cost of a third of the budget
  in 95, and a slowdown as large as the budget has L > 0 in over 99.
- A pilot-sized rule (Stein) rests everything on the spread of the first 8 rounds, and a group-sequential one
  needs a fixed last look, which a budget in minutes on a shared machine does not give.

Pure: the caller brings the contrasts of the rounds so far, and the clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bench.records.types import ALL, OFF, ONLY, WITHOUT, Arm, Segment, log_ratio
from bench.statistics.contrasts import Rounds, collect, contrast_of_round
from bench.statistics.estimates import judging
from bench.statistics.intervals import NOMINAL

MIN_ROUNDS: Final = 8
GROWTH: Final = 1.5
MAX_ROUNDS: Final = 2000
SHARE_OF_BUDGET: Final = 1.0 / 3.0
"""Half-width aimed at, as a share of the budget."""

Contrast = tuple[tuple[str, ...], tuple[str, ...]]
"""Arms, controls."""


def looks(first: int = MIN_ROUNDS, last: int = MAX_ROUNDS) -> Iterator[int]:
    """8, 12, 18, 27, 41, ...: the numbers of rounds at which the rule may stop."""
    n = first
    while n < last:
        yield n
        n = int(n * GROWTH + 0.5)
    yield last


@dataclass(frozen=True, slots=True)
class Decision:
    """Stop or go on.

    Attributes:
        stop: whether to stop now.
        why: "clear" (precise enough), "time", "rounds", or "" while going on.
        waiting: the contrasts that are not precise enough, each with its half-width over the one aimed at,
            the worst first.
    """

    stop: bool
    why: str
    waiting: tuple[tuple[str, float], ...] = ()


def judged(arms: Sequence[Arm], collectors: Sequence[str]) -> dict[str, Contrast]:
    """The contrasts of a plan under the name of the arm that they cost: "all", "only:<c>", "without:<c>" (all
    against it)."""
    names = {arm.name for arm in arms}
    found: dict[str, Contrast] = {}
    if ALL in names:
        found[ALL] = ((ALL,), (OFF,))
    for name in collectors:
        if ONLY + name in names:
            found[ONLY + name] = ((ONLY + name,), (OFF,))
        if WITHOUT + name in names and ALL in names:
            found[WITHOUT + name] = ((ALL,), (WITHOUT + name,))
    return found


class StoppingRule:
    """Holds the contrasts of each finished round, so that a look costs little while the pipeline runs on.

    Args:
        contrasts: name -> (arms, controls).
        budgets_percent: name -> budget of the contrast in percent; contrasts without one are not waited for.
        cycle: batches in the replayed cycle.
    """

    def __init__(
        self, contrasts: Mapping[str, Contrast], budgets_percent: Mapping[str, float], cycle: int
    ) -> None:
        self._contrasts = dict(contrasts)
        self._targets = {
            name: SHARE_OF_BUDGET * log_ratio(percent) for name, percent in budgets_percent.items()
        }
        self._cycle = cycle
        self._rows: dict[str, list[tuple[int, tuple[float, float, float]]]] = {
            name: [] for name in self._targets
        }
        self._count = 0

    def add(self, members: Sequence[Segment]) -> None:
        """Take in one finished round. A round that lacks an arm counts for the contrasts that it does
        hold."""
        self._count += 1
        for name, rows in self._rows.items():
            row = contrast_of_round(members, *self._contrasts[name], self._cycle)
            if row is not None:
                rows.append((members[0].process, row))

    @property
    def rounds(self) -> int:
        """Rounds taken in."""
        return self._count

    def half_widths(self) -> dict[str, float]:
        """Half-width of each contrast over the one aimed at; infinite below two units."""
        return {name: half_width(collect(rows)) / self._targets[name] for name, rows in self._rows.items()}

    def decide(self, *, out_of_time: bool, last: int = MAX_ROUNDS) -> Decision:
        """Apply the rule after a round. `out_of_time`: one more round would not end in time.

        The minimum of 8 rounds is kept even when the time is up.
        """
        if self._count < MIN_ROUNDS or not self._rows:
            return Decision(False, "")
        at_look = self._count in looks(last=last)
        if not at_look and not out_of_time:
            return Decision(False, "")
        waiting = tuple(
            sorted(((n, r) for n, r in self.half_widths().items() if r > 1.0), key=lambda item: -item[1])
        )
        if not waiting and at_look:
            return Decision(True, "clear")
        if out_of_time:
            return Decision(True, "time", waiting)
        return Decision(self._count >= last, "rounds" if self._count >= last else "", waiting)


def half_width(rounds: Rounds) -> float:
    """Half-width in log units of the interval that would be printed; infinite below two units."""
    found = judging(rounds) if len(rounds) else None
    return float("inf") if found is None else found.estimate.bound(NOMINAL)
