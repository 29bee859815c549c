"""Losses laid beside segments: pure functions. The weights stand still, so a group's loss is the same bits
every time."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from steptime.records.pairs import Pair, Segment


@dataclass(frozen=True, slots=True)
class SegmentLosses:
    """What the losses of segments say.

    Attributes:
        equal: of each segment, whether all its steps gave the loss that their group has always given; None:
            no loss arrived.
        by_group: the first loss of each group.
        difference: one line for the first step whose loss differs from the first of its group; empty when
            none does.
        missing: timed steps whose loss never arrived.
    """

    equal: tuple[bool | None, ...]
    by_group: dict[int, float] = field(default_factory=dict)
    difference: str = ""
    missing: int = 0


def check_segments(segments: Sequence[Segment], losses: Sequence[tuple[int, float]]) -> SegmentLosses:
    """Compare each timed step's loss with the first one of the same group, bit for bit.

    Args:
        segments: of one process, in the order taken.
        losses: (step, loss) in any order.
    """
    by_step = dict(losses)
    first: dict[int, tuple[int, float]] = {}
    equal: list[bool | None] = []
    difference, missing = "", 0
    for segment in segments:
        same: bool | None = None
        missing += segment.steps
        for step, loss in _of(segment, by_step):
            missing -= 1
            before = first.setdefault(segment.group, (step, loss))
            alike = struct.pack("<d", before[1]) == struct.pack("<d", loss)
            same = alike and same is not False
            if not alike and not difference:
                on = ", ".join(segment.on) or "none"
                where = f"step {step} (group {segment.group} of the cycle, on: {on})"
                difference = f"{where}: loss {loss!r}, was {before[1]!r} at step {before[0]}"
        equal.append(same)
    return SegmentLosses(tuple(equal), {g: loss for g, (_, loss) in first.items()}, difference, missing)


@dataclass(frozen=True, slots=True)
class PairLosses:
    """Pairs with `losses_equal` filled in; `difference` and `missing` as of `SegmentLosses`."""

    pairs: tuple[Pair, ...]
    difference: str
    missing: int


def check_pair_losses(pairs: Sequence[Pair], losses: Sequence[tuple[int, float]]) -> PairLosses:
    """The same for pairs of one process."""
    found = check_segments([half for pair in pairs for half in (pair.first, pair.second)], losses)
    halves = zip(found.equal[::2], found.equal[1::2], strict=True)
    checked = (replace(pair, losses_equal=both(one)) for pair, one in zip(pairs, halves, strict=True))
    return PairLosses(tuple(checked), found.difference, found.missing)


def both(equal: Sequence[bool | None]) -> bool | None:
    """False where any is; None where any is not known."""
    return False if False in equal else None if None in equal else True


def _of(segment: Segment, by_step: Mapping[int, float]) -> Iterator[tuple[int, float]]:
    for step in range(segment.first_step, segment.first_step + segment.steps):
        if step in by_step:
            yield step, by_step[step]
