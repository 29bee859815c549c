"""Which batches of the plan a rank trains on, and where all ranks together stand. Pure arithmetic.

A step takes ranks x drafters x accumulation batches of the plan, in the order in which one process with as
many drafters would: drafter d of rank r is drafter r * drafters + d of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dflash.data.batch import BatchSpec
from dflash.pipeline.progress import Progress, RemainingPlan, index_left


@dataclass(frozen=True)
class RankShare:
    """Numbers a rank's own batches 0, 1, 2...; their places are those among the batches that were left when
    the leg began.

    Attributes:
        drafters: of each rank.
    """

    rank: int = 0
    ranks: int = 1
    drafters: int = 1

    def place(self, number: int) -> int:
        """Place of this rank's batch `number`."""
        turn, drafter = divmod(number, self.drafters)
        return (turn * self.ranks + self.rank) * self.drafters + drafter

    def number(self, place: int) -> int:
        """The inverse of `place`, for a place of this rank's."""
        turn, drafter = divmod(place, self.drafters)
        return turn // self.ranks * self.drafters + drafter


class RankPlan:
    """A rank's batches of what is left of a plan, under their own plan indices."""

    def __init__(self, inner: RemainingPlan, share: RankShare) -> None:
        self._inner, self._share = inner, share

    def spec(self, number: int) -> BatchSpec:
        return self._inner.spec(self._share.place(number))


def merged(base: Progress, own: Mapping[int, Progress], share: RankShare, step: int) -> Progress:
    """Where the run stands after `step` steps, from where each rank stands.

    Args:
        base: where the leg began, in the plan's indices.
        own: each rank's progress in its own numbers, `floor` and `ahead`.
        share: of any rank; its number of ranks and drafters counts.
    """
    shares = {rank: replace(share, rank=rank) for rank in own}
    floor = min(shares[rank].place(progress.floor) for rank, progress in own.items())
    ahead = []
    for rank, progress in own.items():
        first = progress.floor
        while first > 0 and shares[rank].place(first - 1) >= floor:
            first -= 1
        numbers = (*range(first, progress.floor), *progress.ahead)
        ahead += [index_left(base, shares[rank].place(number)) for number in numbers]
    floor_index = index_left(base, floor)
    ahead += [index for index in base.ahead if index > floor_index]
    return Progress(step, floor_index, tuple(sorted(ahead)))
