"""Two traces of losses: equal bit for bit, apart by rounding alone, or different. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["equal", "rounding", "different"]

ROUNDING: Final = {"float32": 2.0**-18, "bfloat16": 2.0**-10}
"""Largest relative difference of a loss that another order of the same sums explains, by the precision that
the drafter computes in: 64 roundings of float32; of bfloat16 an eighth of one, since a loss is a mean over
hundreds of slots. Chosen, not measured on a GPU. Good for traces whose weights stand still (learning rate 0),
or whose steps are few: training carries a difference of rounding on and lets it grow."""


@dataclass(frozen=True, slots=True)
class TraceDifference:
    """How far two traces of one plan lie apart.

    Attributes:
        step: the first in which they differ; None: in none.
        first, second: the losses of that step; None: that trace has no such step.
        largest: largest relative difference of a step; infinite where one of two is no finite number.
    """

    kind: Kind
    step: int | None = None
    first: float | None = None
    second: float | None = None
    largest: float = 0.0

    @property
    def text(self) -> str:
        """In words."""
        if self.kind == "equal":
            return "equal bit for bit"
        where = f"first in step {self.step}: {self.first!r} and {self.second!r}"
        if self.kind == "rounding":
            return f"apart by rounding alone, at most {self.largest:.1e} of the loss ({where})"
        return f"different ({where}; at most {self.largest:.1e} of the loss)"


def compare(first: Sequence[float], second: Sequence[float], dtype: str) -> TraceDifference:
    """Classify two traces, whose place is the step.

    Traces of unequal length are different, and so are two that are empty: nothing was compared.

    Args:
        dtype: the drafter's, a key of `ROUNDING`.
    """
    bound = ROUNDING[dtype]
    if not first and not second:
        return TraceDifference("different", 0, largest=math.inf)
    apart = [step for step, pair in enumerate(zip(first, second, strict=False)) if not _same(*pair)]
    shared = min(len(first), len(second))
    if not apart and len(first) == len(second):
        return TraceDifference("equal")
    step = apart[0] if apart else shared
    largest = max((_relative(first[one], second[one]) for one in apart), default=0.0)
    if len(first) != len(second):
        largest = math.inf
    return TraceDifference(
        "rounding" if largest <= bound else "different",
        step,
        first[step] if step < len(first) else None,
        second[step] if step < len(second) else None,
        largest,
    )


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _relative(one: float, other: float) -> float:
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))
