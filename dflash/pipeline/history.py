"""What a whole run has done, over all its legs: sums, the first and last steps, and a thinned curve. It never
grows with the run, and travels in the checkpoints."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash.pipeline.scalars_log import StepScalars

START = 10
"""Steps averaged at the start of a run: few, since the loss falls fastest there."""
END = 100
"""Most steps averaged at its end."""
CURVE = 1024
"""Most points of the curve; then two become one."""
SLOTS = (1, 2, 4, 8)
"""Slots whose accuracy the curve shows."""


SUMS = ("steps", "supervised_slots", "seconds", "tokens", "stalled_seconds", "legs", "best_heldout", "stride")
LATER = ("evaluating_seconds", "first_tau", "last_tau")
"""Sums that checkpoints of earlier versions lack."""
LISTS = ("first", "last", "curve", "part")


@dataclass(frozen=True)
class Point:
    """One step, or the mean of several.

    Attributes:
        slots: accuracy of each of `SLOTS` that a block has; NaN where none was supervised.
    """

    step: int
    loss: float
    accept_length: float
    slots: tuple[float, ...]
    grad_norm: float


def mean(points: Sequence[Point]) -> Point:
    """The mean of points, at the step of the last."""

    def of(value: Callable[[Point], float]) -> float:
        known = [number for point in points if not math.isnan(number := value(point))]
        return sum(known) / len(known) if known else math.nan

    slots = range(len(points[-1].slots))
    return Point(
        points[-1].step,
        of(lambda point: point.loss),
        of(lambda point: point.accept_length),
        tuple(of(lambda point, slot=slot: point.slots[slot]) for slot in slots),  # type: ignore[misc]
        of(lambda point: point.grad_norm),
    )


@dataclass
class History:
    """Sums over a run. One thread adds.

    Attributes:
        steps: rows added; less than the run's steps where rows were dropped.
        seconds, tokens: of the legs that ended; the leg under way adds its own to what is saved.
        stalled_seconds: of those, the time in which the whole process stood still.
        legs: starts of the run, this one included.
        best_heldout: the lowest held-out loss.
        evaluating_seconds: of those, the time in which training stood still for `train/tau`.
        first_tau, last_tau: the number of steps done, and τ.
    """

    steps: int = 0
    supervised_slots: int = 0
    seconds: float = 0.0
    tokens: int = 0
    stalled_seconds: float = 0.0
    legs: int = 0
    best_heldout: float | None = None
    evaluating_seconds: float = 0.0
    first_tau: tuple[int, float] | None = None
    last_tau: tuple[int, float] | None = None
    first: list[Point] = field(default_factory=list)
    last: deque[Point] = field(default_factory=lambda: deque(maxlen=END))
    curve: list[Point] = field(default_factory=list)
    stride: int = 1
    part: list[Point] = field(default_factory=list)

    def add(self, row: StepScalars) -> None:
        """One step."""
        known = len(row.slot_accuracy)
        slots = tuple(row.slot_accuracy[slot - 1] for slot in SLOTS if slot <= known)
        point = Point(row.step, row.loss, row.accept_length, slots, row.grad_norm)
        self.steps += 1
        self.supervised_slots += row.supervised_slots
        if len(self.first) < START:
            self.first.append(point)
        self.last.append(point)
        self.part.append(point)
        if len(self.part) >= self.stride:
            self.curve.append(mean(self.part))
            self.part.clear()
        if len(self.curve) >= CURVE:
            self.curve = [mean(self.curve[at : at + 2]) for at in range(0, len(self.curve), 2)]
            self.stride *= 2

    def measured(self, loss: float) -> None:
        """A held-out loss."""
        if math.isfinite(loss) and (self.best_heldout is None or loss < self.best_heldout):
            self.best_heldout = loss

    def decoded(self, step: int, tau: float, seconds: float) -> None:
        """An acceptance length, and how long training stood still for it."""
        self.evaluating_seconds += seconds
        if math.isfinite(tau):
            self.last_tau = (step, tau)
            self.first_tau = self.first_tau or self.last_tau

    @property
    def running_s(self) -> float:
        """Seconds in which it trained."""
        return self.seconds - self.stalled_seconds - self.evaluating_seconds

    def window(self) -> list[Point]:
        """The steps averaged at the end: a tenth of the run, at most `END`."""
        return list(self.last)[-max(1, min(END, self.steps // 10)) :]

    def as_dict(self) -> dict[str, Any]:
        """For `state.json`."""
        lists = {name: [_pack(point) for point in getattr(self, name)] for name in LISTS}
        return {name: getattr(self, name) for name in (*SUMS, *LATER)} | lists

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> History:
        """The inverse of `as_dict`.

        Raises:
            KeyError, TypeError, ValueError: it is not one.
        """
        later = {name: tree[name] for name in LATER if name in tree}
        history = cls(**{name: tree[name] for name in SUMS}, **later)
        for name in LISTS:
            getattr(history, name).extend(_unpack(point) for point in tree[name])
        return history


def _pack(point: Point) -> list[Any]:
    return [point.step, *map(_number, (point.loss, point.accept_length, point.grad_norm, *point.slots))]


def _unpack(packed: list[Any]) -> Point:
    step, loss, accept_length, grad_norm, *slots = (math.nan if part is None else part for part in packed)
    return Point(int(step), loss, accept_length, tuple(slots), grad_norm)


def _number(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return float(value) if math.isfinite(value) else None
