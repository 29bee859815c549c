"""Losses beside pairs: equal bits for equal groups, and the first difference named."""

from __future__ import annotations

import math

import pytest

from steptime.records.pairs import Layer, Pair, Question, Segment
from steptime.subjects.group_losses import check_pair_losses


def pair(number: int, group: int, first: int, steps: int = 2) -> Pair:
    halves = [
        Segment(on, steps, 100, 1.0, group=group, first_step=first + at * steps)
        for at, on in enumerate((("a",), ("b", "c")))
    ]
    return Pair(number, Layer.PATH, Question.EACH, *halves)


PAIRS = [pair(0, 3, 10), pair(1, 3, 14), pair(2, 1, 30), pair(3, 3, 40)]
LOSSES = dict.fromkeys((*range(10, 18), *range(40, 44)), 2.0 + 1 / 3) | dict.fromkeys(range(30, 34), 5.0)


def test_equal_bits_are_equal() -> None:
    found = check_pair_losses(PAIRS, [*LOSSES.items()][::-1])
    assert [one.losses_equal for one in found.pairs] == [True] * 4
    assert (found.difference, found.missing) == ("", 0)


@pytest.mark.fault
def test_a_difference_of_one_bit_is_named_and_only_its_pairs_differ() -> None:
    changed = math.nextafter(LOSSES[17], 3.0)
    found = check_pair_losses(PAIRS, [*(LOSSES | {17: changed, 32: 4.0}).items()])
    assert [one.losses_equal for one in found.pairs] == [True, False, False, True]
    assert found.difference == (
        f"step 17 (group 3 of the cycle, on: b, c): loss {changed!r}, was {LOSSES[10]!r} at step 10"
    )


def test_losses_that_never_came_are_counted_and_claim_nothing() -> None:
    known = {step: loss for step, loss in LOSSES.items() if step not in (11, 40, 41, 42, 43)}
    found = check_pair_losses(PAIRS, [*known.items()])
    assert [one.losses_equal for one in found.pairs] == [True, True, True, None]
    assert (found.difference, found.missing) == ("", 5)


@pytest.mark.fault
def test_negative_zero_is_another_loss() -> None:
    found = check_pair_losses([pair(0, 0, 0)], [(0, 0.0), (1, -0.0), (2, 0.0), (3, 0.0)])
    assert found.pairs[0].losses_equal is False
