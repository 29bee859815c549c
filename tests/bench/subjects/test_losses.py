"""Losses beside segments: equal bits from any phase, and the first difference named."""

from __future__ import annotations

import pytest

from bench.records.types import Segment
from bench.subjects.losses import check_losses
from bench.subjects.protocol import Taken

CYCLE = 4


def taken(arm: str, first: int, steps: int = 4) -> Taken:
    return Taken(first, Segment(arm, 0, 0, steps, 100, 1.0, phase=first % CYCLE))


def loss(step: int) -> float:
    return 2.0 + step % CYCLE / 3


SEGMENTS = [taken("off", 2), taken("only:x", 7, steps=8), taken("all", 17)]
LOSSES = [(step, loss(step)) for step in range(24)]


def test_equal_work_gives_equal_digests_wherever_a_segment_begins() -> None:
    found = check_losses(SEGMENTS, LOSSES, CYCLE)
    assert len({segment.losses_digest for segment in found.segments}) == 1
    assert found.segments[0].losses_digest
    assert found.losses == dict.fromkeys(("off", "only:x", "all"), tuple(loss(step) for step in range(CYCLE)))
    assert found.difference == ""
    assert found.missing == 0


@pytest.mark.parametrize(
    ("step", "where"),
    [
        (9, "arm only:x"),
        (13, "arm only:x"),
        (16, "washout of arm all"),
        (18, "arm all"),
        (23, "after the last segment"),
    ],
)
def test_a_single_changed_bit_is_found_with_arm_and_step(step: int, where: str) -> None:
    changed = [(s, value if s != step else value * (1 + 2**-52)) for s, value in LOSSES]
    found = check_losses(SEGMENTS, changed, CYCLE)
    assert f"step {step} (batch {step % CYCLE} of the cycle, {where})" in found.difference
    assert repr(loss(step)) in found.difference
    digests = {segment.losses_digest for segment in found.segments}
    assert len(digests) == (2 if where.startswith("arm") else 1)


def test_the_order_in_which_losses_come_does_not_matter() -> None:
    assert check_losses(SEGMENTS, list(reversed(LOSSES)), CYCLE) == check_losses(SEGMENTS, LOSSES, CYCLE)


def test_a_segment_that_lost_a_batch_has_no_digest() -> None:
    found = check_losses(SEGMENTS, [(step, value) for step, value in LOSSES if step != 3], CYCLE)
    assert found.missing == 1
    assert found.segments[0].losses_digest == ""
    assert "off" not in found.losses
    assert found.segments[1].losses_digest
