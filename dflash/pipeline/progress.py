"""Where a run stands in its plan: which batches it has trained on, and which are left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dflash.data.batch import BatchSpec
from dflash.data.plan import Plan

FOLD_EVERY = 64
"""Steps between two foldings of what mixed drafters have drawn."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands.

    Attributes:
        step: optimizer steps done.
        floor: every batch of the plan below this index has been trained on.
        ahead: indices at or over `floor` that were trained on too (drafters that draw in mixed order).
    """

    step: int = 0
    floor: int = 0
    ahead: tuple[int, ...] = ()


def progress_after(step: int, base: Progress, consumed: Iterable[int]) -> Progress:
    """`base` plus the batches `consumed` since then, in the tightest form."""
    done = {*consumed, *base.ahead}
    floor = base.floor
    while floor in done:
        done.remove(floor)
        floor += 1
    return Progress(step, floor, tuple(sorted(index for index in done if index >= floor)))


class RemainingPlan:
    """A plan without the batches that were trained on: `spec(i)` is the i-th one left, under its own
    index."""

    def __init__(self, inner: Plan, progress: Progress) -> None:
        self._inner, self._progress = inner, progress

    def spec(self, i: int) -> BatchSpec:
        return self._inner.spec(index_left(self._progress, i))


def index_left(progress: Progress, i: int) -> int:
    """Plan index of the i-th batch that is left."""
    index = progress.floor + i
    for taken in progress.ahead:
        if taken <= index:
            index += 1
    return index


def place_left(progress: Progress, index: int) -> int:
    """The inverse of `index_left`, for a batch that was left."""
    return index - progress.floor - sum(taken < index for taken in progress.ahead)


class Drawn:
    """What mixed drafters draw, folded into a `Progress` as the run goes, so that it never grows with the
    run.

    Each drafter appends (step, plan index) to its own deque. `after` is called by drafter 0 at a step
    boundary, or when the workers have ended: by then every draw of the steps before is there."""

    def __init__(
        self,
        base: Progress,
        logs: Sequence[deque[tuple[int, int]]],
        number: Callable[[int], int] = lambda index: index,
    ) -> None:
        self._progress, self._logs, self._number = base, logs, number

    def after(self, steps_done: int) -> Progress:
        """Where the run stands after its first `steps_done` steps."""
        consumed = []
        for log in self._logs:
            while log and log[0][0] < steps_done:
                consumed.append(self._number(log.popleft()[1]))
        self._progress = progress_after(steps_done, self._progress, consumed)
        return self._progress
