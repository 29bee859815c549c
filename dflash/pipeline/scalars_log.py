"""Training scalars of all drafters, joined by step; made late, off the workers' path."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

_Row = tuple[int, np.ndarray, tuple[int, ...]]


@dataclass(frozen=True)
class StepScalars:
    """What one optimizer step reports.

    Attributes:
        step: optimizer step, from 0.
        loss: sum(w * CE) / sum(w) over all drafters.
        accept_length: mean over blocks of the leading slots guessed right, plus 1 (the bonus token).
        slot_accuracy: share guessed right of the supervised slots k = 1..block-1; NaN where none was
            supervised.
        grad_norm: of the normalised gradient, before clipping.
        plan_indices: batches of the step, in the plan's numbers.
        missing: drafters whose row of the step was dropped since their ring was full; the other figures are
            of the rest.
    """

    step: int
    loss: float
    accept_length: float
    slot_accuracy: tuple[float, ...]
    grad_norm: float
    supervised_slots: int
    plan_indices: tuple[int, ...]
    missing: int = 0

    def metrics(self, lr: float) -> dict[str, float]:
        """As `train/*` keys; what is not there is left out."""
        values = {
            "train/loss": self.loss,
            "train/accept_length": self.accept_length,
            "train/grad_norm": self.grad_norm,
            "train/lr": lr,
        }
        if self.missing:
            values["train/drafters_missing"] = float(self.missing)
        values |= {f"train/slot_{k}_accuracy": a for k, a in enumerate(self.slot_accuracy, start=1)}
        return {
            key: value
            for key, value in values.items()
            if not (math.isnan(value) and key.startswith("train/slot_"))
        }


class ScalarsLog:
    """Joins the drafters' late vectors by their step. `arrived` is called by each drafter's owner, `take`
    by one reader.

    A drafter whose ring was full drops a row. Its later rows say so; the step is then told without it, and
    the rows of the others are still looked at.

    Attributes:
        width: floats in a drafter's vector.
    """

    def __init__(self, drafters: int, block_size: int) -> None:
        self._queues: list[deque[_Row]] = [deque() for _ in range(drafters)]
        self._newest = [-1] * drafters
        self._steps: dict[int, dict[int, _Row]] = {}
        self._slots = block_size - 1
        self.width = 4 + 2 * self._slots + 1

    def arrived(self, drafter: int, entries: Sequence[_Row]) -> None:
        """Add a drafter's completed vectors, in step order: `(step, vector, plan indices)`."""
        self._queues[drafter].extend(entries)

    def raw(self) -> list[tuple[int, _Row]]:
        """What has arrived, with its drafter, for somebody else to join; instead of `take`."""
        rows = []
        for drafter, queue in enumerate(self._queues):
            while queue:
                rows.append((drafter, queue.popleft()))
        return rows

    def take(self, *, final: bool = False) -> list[StepScalars]:
        """The steps that every drafter has reported or passed, in order.

        Args:
            final: nothing more will come; what is there is all.
        """
        for drafter, queue in enumerate(self._queues):
            while queue:
                row = queue.popleft()
                self._steps.setdefault(row[0], {})[drafter] = row
                self._newest[drafter] = row[0]
        passed = max(self._steps, default=-1) if final else min(self._newest)
        rows = []
        for step in sorted(step for step in self._steps if step <= passed):
            parts = self._steps.pop(step)
            in_order = [parts[drafter] for drafter in sorted(parts)]
            joined = join(
                step,
                [vector for _, vector, _ in in_order],
                sum((indices for _, _, indices in in_order), ()),
                self._slots,
            )
            rows.append(replace(joined, missing=len(self._queues) - len(parts)))
        return rows


def join(step: int, vectors: Sequence[np.ndarray], plan_indices: tuple[int, ...], slots: int) -> StepScalars:
    """One step's scalars from each drafter's vector `[4 + 2 * slots + 1]` (objective's layout, then the
    norm)."""
    total = np.sum([vector[:-1].astype(np.float64) for vector in vectors], axis=0)
    loss_sum, weight_sum, blocks, accepted = total[:4]
    correct, supervised = total[4 : 4 + slots], total[4 + slots : 4 + 2 * slots]
    with np.errstate(invalid="ignore", divide="ignore"):
        accuracy = np.where(supervised > 0, correct / supervised, np.nan)
    return StepScalars(
        step=step,
        loss=float(loss_sum) / float(weight_sum)
        if weight_sum > 0
        else (0.0 if loss_sum == 0 else float(loss_sum)),
        accept_length=float(accepted / blocks) if blocks > 0 else 1.0,
        slot_accuracy=tuple(float(value) for value in accuracy),
        grad_norm=float(vectors[0][-1]),
        supervised_slots=int(supervised.sum()),
        plan_indices=plan_indices,
    )
