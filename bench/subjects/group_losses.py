"""Losses laid beside pairs: pure functions. The weights stand still, so a group's loss is the same bits every
time."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bench.records.pairs import Pair, Segment


@dataclass(frozen=True, slots=True)
class PairLosses:
    """What the losses say.

    Attributes:
        pairs: the pairs with `losses_equal` filled in.
        difference: one line for the first step whose loss differs from the first of its group; empty when
        none
            does.
        missing: timed steps whose loss never arrived.
    """

    pairs: tuple[Pair, ...]
    difference: str
    missing: int


def check_pair_losses(pairs: Sequence[Pair], losses: Sequence[tuple[int, float]]) -> PairLosses:
    """Compare each timed step's loss with the first one of the same group, bit for bit.

    Args:
        pairs: of one process, in the order taken.
        losses: (step, loss) in any order.
    """
    by_step = dict(losses)
    first: dict[int, tuple[int, float]] = {}
    found: list[Pair] = []
    difference, missing = "", 0
    for pair in pairs:
        equal: bool | None = None
        for segment in (pair.first, pair.second):
            missing += segment.steps
            for step, loss in _of(segment, by_step):
                missing -= 1
                before = first.setdefault(segment.group, (step, loss))
                same = struct.pack("<d", before[1]) == struct.pack("<d", loss)
                equal = same and equal is not False
                if not same and not difference:
                    difference = (
                        f"step {step} (group {segment.group} of the cycle, pair {pair.number}, on: "
                        f"{', '.join(segment.on) or 'none'}): loss {loss!r}, was {before[1]!r} at step "
                        f"{before[0]}"
                    )
        found.append(replace(pair, losses_equal=equal))
    return PairLosses(tuple(found), difference, missing)


def _of(segment: Segment, by_step: Mapping[int, float]) -> Iterator[tuple[int, float]]:
    for step in range(segment.first_step, segment.first_step + segment.steps):
        if step in by_step:
            yield step, by_step[step]
