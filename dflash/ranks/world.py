"""This process as one rank of a run over several machines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dflash.ranks.across import Across
from dflash.ranks.board import Board, Post, StoreGone
from dflash.ranks.watch import RankFailed, RankWatch
from steptime.errors import UserError

_DIFFERENCES = 3
_PATIENCE_S = 10.0


@dataclass
class World:
    """One rank among `ranks`, each with the same number of drafters.

    Attributes:
        timeout_s: how long anything waits for another rank that gives no sign of life.
        post: this rank's messages to rank 0.
        failing: this rank has said that it ends.
    """

    rank: int
    ranks: int
    board: Board
    across: Across
    watch: RankWatch
    timeout_s: float

    def __post_init__(self) -> None:
        self.post = Post(self.board, self.rank)
        self.failing = False
        self._failed_s = 0.0

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which owns the run's folder and the sinks."""
        return self.rank == 0

    def fail(self, line: str) -> None:
        """Tell the others that this rank ends, and why. Of use once; what comes later is not sent."""
        if self.failing or self.watch.failure is not None:
            return
        self.failing = True
        with contextlib.suppress(StoreGone):  # then they find out by themselves
            self.watch.tell(line)

    def of_first(self, key: str) -> Any:
        """What rank 0 has posted; waits for it.

        Raises:
            RankFailed: rank 0 could not.
        """
        value = self.board.wait(key, float("inf"), over=lambda: self.watch.failure is not None)
        if value is None:
            raise self.watch.failure or RankFailed("rank 0 ended")
        return value

    def check_same(self, what: Mapping[str, Any], why: str) -> None:
        """Refuse to go on when `what` of this rank differs from rank 0's.

        Raises:
            UserError: naming what differs, with both values.
            RankFailed: rank 0 could not say.
        Rank 0 does not wait: what differs fails on the other side, and ends it from there.
        """
        if self.first:
            self.board.post(f"same/{why}", dict(what))
            return
        theirs = self.of_first(f"same/{why}")
        reasons = [
            f"{key} is {theirs.get(key)!r} on rank 0 and {what.get(key)!r} on rank {self.rank}"
            for key in sorted({*theirs, *what})
            if theirs.get(key) != _as_json(what.get(key))
        ]
        if reasons:
            more = f" and {len(reasons) - _DIFFERENCES} more" if len(reasons) > _DIFFERENCES else ""
            raise UserError(f"{why}: {'; '.join(reasons[:_DIFFERENCES])}{more}")

    @torch.no_grad()
    def broadcast(self, drafter: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Rank 0's values of a drafter's tensors, in place; contiguous, on the drafter's device."""
        for name in sorted(tensors):
            self.across.broadcast(drafter, tensors[name].view(-1))

    def done(self) -> None:
        """A rank over 0: its training is over, and all of its steps are told."""
        self.board.post(f"done/{self.rank}", True)

    def others_done(self) -> None:
        """Rank 0: wait for `done` of every other rank that has not failed, and read what it told."""
        self._hear_out("done")

    def others_left(self) -> None:
        """Rank 0: likewise for the end of their processes' parts."""
        self._hear_out("left")

    def _hear_out(self, word: str) -> None:
        with contextlib.suppress(StoreGone):
            for other in range(1, self.ranks):
                self.board.wait(f"{word}/{other}", self.timeout_s, over=self._given_up)
            self.watch.catch_up()

    def leave(self) -> None:
        """The end of this process's part. Nobody goes before rank 0 has heard all of them, and rank 0 goes
        last: the store may live in its process. Bounded when somebody has failed or is gone."""
        with contextlib.suppress(StoreGone):
            self.board.post(f"left/{self.rank}", True)
            if self.first:
                self.others_left()
                self.board.post("over", True)
            else:
                self.board.wait("over", 2 * self.timeout_s, over=self._given_up)
        self.watch.close()

    def _given_up(self) -> bool:
        """Whether somebody has failed, and the others have had a moment to come."""
        if self.watch.failure is None and not self.failing:
            return False
        self._failed_s = self._failed_s or time.monotonic()
        return time.monotonic() > self._failed_s + min(_PATIENCE_S, self.timeout_s)


def _as_json(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_as_json(part) for part in value]
    return value
