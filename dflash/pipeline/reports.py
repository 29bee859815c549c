"""The rows of a run in the main thread: to the observer, into the history, and a NaN stops the run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from dflash.config import TrainConfig
from dflash.observe.observer import Observer
from dflash.pipeline.checkpoint import State
from dflash.pipeline.history import History
from dflash.pipeline.scalars_log import ScalarsLog, StepScalars
from dflash.pipeline.schedule import learning_rate
from steptime.errors import UserError

STALL_S = 5.0
"""The main thread looks ten times a second; when it could not for so long, the whole process stood still."""


class NonFiniteLoss(RuntimeError):
    """The loss or the gradient of a step was NaN or infinite; found late, from the ring, without a sync."""

    plan_indices: tuple[int, ...] = ()


class Reports:
    """Owned by the main thread.

    Args:
        resume: the checkpoint that the run goes on from; its history goes on.
        sample_ids: rows of the data set in a batch of the plan, to name them.
        saw: called with each step whose scalars are finite.
        behind: called after the steps that have arrived.

    Raises:
        UserError: the checkpoint's history cannot be read.
    """

    def __init__(
        self,
        scalars: ScalarsLog,
        observer: Observer,
        config: TrainConfig,
        resume: State | None,
        *,
        sample_ids: Callable[[int], tuple[int, ...]],
        saw: Callable[[int], None],
        behind: Callable[[], None],
        keep: list[StepScalars] | None,
    ) -> None:
        self._scalars, self._observer, self._config = scalars, observer, config
        self._sample_ids, self._saw, self._behind, self._keep = sample_ids, saw, behind, keep
        self.history = _history_of(resume)
        self.history.legs += 1
        self._before_s, self._before_tokens = self.history.seconds, self.history.tokens
        self._started_s = self._polled_s = 0.0

    def start(self) -> None:
        """The workers are about to start."""
        self._started_s = self._polled_s = time.perf_counter()

    def take(self, *, final: bool = False) -> None:
        """Report the steps that have arrived.

        Args:
            final: the drafters have ended; nothing more will come.

        Raises:
            NonFiniteLoss: the first one that is not finite; it is reported too.
        """
        for row in self._scalars.take(final=final):
            if row.missing:
                self._observer.event(
                    f"step {row.step}: the scalars of {row.missing} drafters were dropped; a larger "
                    "observe.ring keeps them"
                )
            if self._keep is not None:
                self._keep.append(row)
            self._observer.late(row.step, row.metrics(learning_rate(row.step, self._config)))
            if not (math.isfinite(row.loss) and math.isfinite(row.grad_norm)):
                raise self._non_finite(row)
            self.history.add(row)
            self._saw(row.step)
        self._behind()

    def note_stall(self) -> None:
        """The time in which the whole process stood still counts apart."""
        now_s = time.perf_counter()
        gap_s, self._polled_s = now_s - self._polled_s, now_s
        if gap_s > STALL_S:
            self.history.stalled_seconds += gap_s
            self._observer.event(
                f"stall: nothing ran for {gap_s:.0f} s (the process was stopped, or the machine slept)",
                stalled_s=gap_s,
            )

    def history_at(self, tokens: int) -> dict[str, Any]:
        """The run's history as of now, for a checkpoint.

        Args:
            tokens: context tokens that this leg has trained on.
        """
        return self.history.as_dict() | {
            "seconds": self._before_s + self._elapsed_s(),
            "tokens": self._before_tokens + tokens,
        }

    def end(self, tokens: int) -> float:
        """The workers have ended: close the leg; its seconds."""
        seconds = self._elapsed_s()
        self.history.seconds, self.history.tokens = self._before_s + seconds, self._before_tokens + tokens
        return seconds

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._started_s

    def _non_finite(self, row: StepScalars) -> NonFiniteLoss:
        ids = [self._sample_ids(index) for index in row.plan_indices]
        what = f"loss is {row.loss}" if not math.isfinite(row.loss) else f"gradient's norm is {row.grad_norm}"
        text = f"step {row.step}: {what}; batches {list(row.plan_indices)}, samples {ids}"
        self._observer.event(text, failed_step=row.step)
        error = NonFiniteLoss(text)
        error.plan_indices = row.plan_indices
        return error


def _history_of(resume: State | None) -> History:
    if resume is None or not resume.history:
        return History()
    try:
        return History.from_dict(resume.history)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"checkpoint of step {resume.progress.step}: its history cannot be read: {error!r}"
        ) from None
