"""What is meant passes and is said; what was not allowed does not."""

from __future__ import annotations

import pytest

from steptime.records.types import CountedPlace, ExactCounts
from steptime.statistics.intended import (
    Allowance,
    LossComparison,
    Numerics,
    Rise,
    allow,
    compare_losses,
    rises_by_place,
)

BASE = (3.0, 2.5, 2.0)


def test_equal_losses_pass_however_they_are_asked_for() -> None:
    for numerics in Numerics:
        assert compare_losses(BASE, BASE, numerics, reason="why") == LossComparison()


@pytest.mark.fault
def test_same_means_the_bits() -> None:
    found = compare_losses(BASE, (3.0, 2.5000000000000004, 2.0), Numerics.SAME, of="loss of step")
    assert found.refused == "loss of step 1: 2.5000000000000004 against 2.5"
    assert not found.accepted
    assert compare_losses((0.0,), (-0.0,), Numerics.SAME).refused


@pytest.mark.fault
def test_close_accepts_up_to_its_tolerance_and_says_the_worst() -> None:
    near = compare_losses(BASE, (3.0006, 2.5, 2.001), Numerics.CLOSE)
    assert near.accepted == (
        "losses are close, not equal (0.1% allowed): loss of step 2 differs by 0.05%, the most of 2"
    )
    far = compare_losses(BASE, (3.0006, 2.5, 2.01), Numerics.CLOSE)
    assert far.refused == "loss of step 2 differs by 0.5%, the most of 2; 0.1% is allowed"
    assert compare_losses(BASE, (3.0006, 2.5, 2.01), Numerics.CLOSE, tolerance=0.01).accepted
    for broken in (float("nan"), float("inf")):
        assert compare_losses(BASE, (3.0, broken, 2.0), Numerics.CLOSE).refused


@pytest.mark.fault
def test_changed_needs_a_reason_and_steps_that_are_missing_are_never_close() -> None:
    with pytest.raises(ValueError, match="reason"):
        compare_losses(BASE, BASE, Numerics.CHANGED)
    found = compare_losses(BASE, (9.0, 2.5, 2.0), Numerics.CHANGED, reason="new loss")
    assert found.accepted == "losses may change (new loss): loss of step 0 differs by 200%, the most of 1"
    for numerics in Numerics:
        assert compare_losses(BASE, BASE[:2], numerics, reason="x").refused


def counts(*places: CountedPlace) -> ExactCounts:
    return ExactCounts("x", 8, True, places=places)


def test_rises_are_found_by_file_and_function_though_lines_move() -> None:
    before = counts(
        CountedPlace("sync", "drafter/0", "train.py:31 step", 8, 8),
        CountedPlace("copy", "target", "train.py:60 pack", 4, 8),
    )
    after = counts(
        CountedPlace("sync", "drafter/0", "train.py:35 step", 8, 8),
        CountedPlace("sync", "drafter/0", "train.py:90 log", 16, 8),
        CountedPlace("copy", "target", "train.py:66 pack", 5, 8),
    )
    assert rises_by_place(before, after) == (
        Rise("syncs", "drafter/0", "train.py:90 log", 16),
        Rise("copies", "target", "train.py:66 pack", 1),
    )
    assert rises_by_place(after, after) == ()


RISES = (
    Rise("syncs", "drafter/0", "train.py:90 log", 16),
    Rise("operations", "drafter/0", "train.py:90 log", 16),
)
ADDED: dict[str, int | None] = {"syncs": 16, "operations": 16, "copies": 0, "allocations": None}


def allowance(**changes: object) -> Allowance:
    fields = {"kind": "syncs", "role": "drafter/*", "place": "train.py log", "most": 16, "reason": "logs"}
    return Allowance(**(fields | changes))  # type: ignore[arg-type]


def test_an_allowance_covers_its_kind_at_its_place() -> None:
    found = allow(ADDED, RISES, [allowance()])
    assert found.left == {"operations": 16}
    assert found.accepted == ("syncs: drafter/* train.py log +16, 16 used (logs)",)
    both = allow(ADDED, RISES, [allowance(), allowance(kind="operations", place="*", most=99)])
    assert both.left == {}
    assert both.accepted[1] == "operations: drafter/* * +99, 16 used (logs)"


@pytest.mark.fault
@pytest.mark.parametrize(
    "wrong",
    [{"kind": "copies"}, {"role": "target"}, {"place": "train.py step"}, {"place": "other.py*"}],
)
def test_an_allowance_for_something_else_covers_nothing_and_is_named(wrong: dict[str, object]) -> None:
    found = allow(ADDED, RISES, [allowance(**wrong)])
    assert found.left == {"syncs": 16, "operations": 16}
    assert len(found.unused) == 1


@pytest.mark.fault
def test_a_rise_beyond_what_is_allowed_or_at_no_place_is_left() -> None:
    assert allow(ADDED, RISES, [allowance(most=15)]).left["syncs"] == 1
    assert allow(ADDED | {"syncs": 20}, RISES, [allowance(most=99)]).left["syncs"] == 4
    # The same rise is not covered twice.
    twice = allow(ADDED | {"syncs": 32}, RISES, [allowance(), allowance()])
    assert twice.left["syncs"] == 16
