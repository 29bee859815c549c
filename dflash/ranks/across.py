"""A drafters' step across ranks: all agree that it happens, then their gradients are summed.

The agreement is a sum of a few host numbers, so it waits for other *ranks* to have drawn their batches,
never for a device. No rank enters the sum of the gradients before every rank has said that it is in the step:
a rank that has failed leaves nobody inside a collective that cannot end."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_POLL_S = 0.0001


class RanksClosed(RuntimeError):
    """The run is stopping; nothing more is agreed or summed."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one drafter brings to a step, or one rank, or all together.

    Attributes:
        weight: sum of the slot weights, the loss's denominator.
        tokens: real context tokens.
        stop: end the run after this step.
        save: a checkpoint is taken behind this step.
    """

    weight: float
    tokens: int
    stop: bool
    save: bool = False


def total(shares: Sequence[Share]) -> Share:
    """All of them together, added in their order."""
    return Share(
        sum(share.weight for share in shares),
        sum(share.tokens for share in shares),
        any(share.stop for share in shares),
        any(share.save for share in shares),
    )


class Across:
    """Owned by the gradient exchange of one rank.

    Args:
        host: process group for host memory (gloo); used by drafter 0's thread alone.
        gradients: a process group for each drafter of a rank, since collectives of one group must come in
            the same order everywhere, and drafters are threads. Drafter d of every rank shares the d-th.
        polls: their work is done on the host (gloo), so that the caller must wait for its end; NCCL's is
            enqueued behind the current stream, which then waits for it.
        blame: what to raise when a group breaks: who has failed. May take seconds; the run is over.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        host: Any,
        gradients: Sequence[Any],
        *,
        polls: bool,
        blame: Callable[[str], BaseException],
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self._host, self._gradients, self._polls, self._blame = host, gradients, polls, blame
        self._all = torch.zeros(ranks, 4, dtype=torch.float64)
        self._numbers = self._all.numpy()  # the same memory
        self._closed = False
        self._begun: list[Any] = []

    def agree(self, share: Share) -> Share:
        """Every rank's share added up, the same numbers on each; waits until all have called.

        Raises:
            RanksClosed: this rank is stopping.
            Exception: what `blame` gives, when another rank has failed.
        """
        # Each rank fills its own row, and the sum of the matrices holds them all, to the bit. A gather would
        # copy its outputs inside `wait`, where a mode that counts syncs cannot be called.
        self._numbers.fill(0.0)
        self._numbers[self.rank] = share.weight, share.tokens, share.stop, share.save
        self._finish(lambda: self._host.allreduce([self._all]))
        rows = self._numbers.tolist()
        return total([Share(row[0], int(row[1]), bool(row[2]), bool(row[3])) for row in rows])

    def add(self, drafter: int, gradient: torch.Tensor) -> None:
        """Sum `gradient`, one-dimensional on the drafter's device, over the ranks, in place. With NCCL the
        current stream waits, and the host does not.

        Raises:
            as `agree`.
        """
        group = self._gradients[drafter]
        if self._polls:
            self._finish(lambda: group.allreduce([gradient]))
        else:
            group.allreduce([gradient]).wait()

    def begin(self, drafter: int, gradient: torch.Tensor) -> None:
        """As `add`, but it only starts: `gradient` must stay as it is until `finish`. Waits for nobody, so
        that what computes other gradients goes on; every rank begins the same parts in the same order."""
        try:
            self._begun.append(self._gradients[drafter].allreduce([gradient]))
        except RuntimeError as error:
            raise self._fault(error) from error

    def finish(self) -> None:
        """The end of all that `begin` started; raises as `agree`."""
        begun, self._begun = self._begun, []
        for work in begun:
            if self._polls:
                self._finish(lambda one=work: one)  # type: ignore[misc]
            else:
                work.wait()

    def broadcast(self, drafter: int, tensor: torch.Tensor) -> None:
        """Rank 0's values, in place; before the first step."""
        group = self._gradients[drafter]
        if self._polls:
            self._finish(lambda: group.broadcast([tensor]))
        else:
            group.broadcast([tensor]).wait()

    def close(self) -> None:
        """End every wait."""
        self._closed = True

    def _finish(self, start: Callable[[], Any]) -> None:
        """Begin a collective and wait for its end on the host, so that closing or a failed rank ends it."""
        try:
            work = start()
            while not work.is_completed():
                if self._closed:
                    raise RanksClosed
                time.sleep(_POLL_S)
            work.wait()
        except RanksClosed:
            raise
        except RuntimeError as error:
            raise self._fault(error) from error

    def _fault(self, error: RuntimeError) -> BaseException:
        return RanksClosed() if self._closed else self._blame(_in_short(str(error)))


def _in_short(text: str) -> str:
    """What gloo says, without its source file and its advice."""
    return re.sub(r"^\[[^]]*\] ", "", text.partition("\n")[0]).partition(". ")[0]
