"""Losses laid beside the segments: pure functions. The weights stand still, so a batch's loss is the same
bits every time."""

from __future__ import annotations

import bisect
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.records.types import Segment
from bench.subjects.protocol import Taken


@dataclass(frozen=True, slots=True)
class LossCheck:
    """What the losses say.

    Attributes:
        segments: the segments with their digests filled in.
        losses: one cycle of each arm, phase 0 first; NaN never occurs, an arm with a batch missing is left
            out.
        difference: one line for the first step that differs from the first time its batch came; empty when
            none does.
        missing: steps inside segments whose loss never arrived.
    """

    segments: tuple[Segment, ...]
    losses: dict[str, tuple[float, ...]]
    difference: str
    missing: int


def check_losses(taken: Sequence[Taken], losses: Sequence[tuple[int, float]], cycle: int) -> LossCheck:
    """Fill in the digests and find the first step whose loss differs from that of the same batch before.

    Every step that has a loss is looked at, the washouts too. Equality is that of the bits.
    """
    by_step = dict(losses)
    segments: list[Segment] = []
    per_arm: dict[str, dict[int, float]] = {}
    missing = 0
    for item in taken:
        segment = item.segment
        seen: dict[int, set[float]] = {}
        for step in range(item.first_step, item.first_step + segment.steps):
            if step not in by_step:
                missing += 1
                continue
            seen.setdefault(step % cycle, set()).add(by_step[step])
            per_arm.setdefault(segment.arm, {})[step % cycle] = by_step[step]
        complete = len(seen) == cycle
        segments.append(replace(segment, losses_digest=_digest(seen, cycle) if complete else ""))
    whole = {
        arm: tuple(values[place] for place in range(cycle))
        for arm, values in per_arm.items()
        if len(values) == cycle
    }
    return LossCheck(tuple(segments), whole, first_difference(taken, losses, cycle), missing)


def _digest(seen: dict[int, set[float]], cycle: int) -> str:
    value = hashlib.sha256()
    for place in range(cycle):
        # One value for each batch when all is well; a batch with several changes the digest, as it must.
        for loss in sorted(seen[place]):
            value.update(struct.pack("<id", place, loss))
    return value.hexdigest()[:16]


def first_difference(taken: Sequence[Taken], losses: Sequence[tuple[int, float]], cycle: int) -> str:
    """`step 41 (batch 1 of the cycle, arm only:x): loss ..., was ... at step 1`, or an empty string."""
    first: dict[int, tuple[int, float]] = {}
    starts = [item.first_step for item in taken]
    for step, loss in sorted(losses):
        before = first.setdefault(step % cycle, (step, loss))
        if _bits(before[1]) == _bits(loss):
            continue
        at = bisect.bisect_right(starts, step) - 1
        inside = at >= 0 and step < starts[at] + taken[at].segment.steps
        following = at + 1 < len(taken)
        if inside:
            where = f"arm {taken[at].segment.arm}"
        elif following:
            where = f"washout of arm {taken[at + 1].segment.arm}"
        else:
            where = "after the last segment"
        return (
            f"step {step} (batch {step % cycle} of the cycle, {where}): loss {loss!r}, was {before[1]!r} at "
            f"step {before[0]}"
        )
    return ""


def _bits(value: float) -> bytes:
    return struct.pack("<d", value)
