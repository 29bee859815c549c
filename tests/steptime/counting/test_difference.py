"""Pure: only what differs, syncs first."""

from __future__ import annotations

import pytest

from steptime.counting.difference import CountRow, counts_table, difference, table
from steptime.syncs.scopes import OPERATION, Place

HERE = Place("/site-packages/torchless/a.py", 3, "f")
THERE = Place("b.py", 1, "g")


def test_equal_counts_leave_no_row() -> None:
    counts = {("drafter/0", "item()", HERE): 4, ("target/0", OPERATION, THERE): 10}
    assert difference(counts, dict(counts)) == []
    assert "no difference" in table([])


def test_rows_are_those_that_differ_either_way() -> None:
    off = {
        ("drafter/0", "item()", HERE): 4,
        ("target/0", OPERATION, THERE): 10,
        ("monitor", "numpy()", HERE): 1,
    }
    on = {("drafter/0", "item()", HERE): 6, ("target/0", OPERATION, THERE): 11}
    assert difference(off, on) == [
        CountRow("drafter/0", "item()", HERE, 4, 6),
        CountRow("monitor", "numpy()", HERE, 1, 0),
        CountRow("target/0", OPERATION, THERE, 10, 11),
    ]


def test_table_names_role_kind_line_and_both_counts() -> None:
    text = table([CountRow("drafter/0", "item()", HERE, 0, 4)])
    for word in (
        "role",
        "kind",
        "file:line",
        "function",
        "off",
        "on",
        "drafter/0",
        "item()",
        "torchless/a.py:3",
        "f",
    ):
        assert word in text


@pytest.mark.parametrize(("steps", "shown"), [(0, "3"), (4, "0.75"), (3, "1")])
def test_counts_per_step(steps: int, shown: str) -> None:
    assert counts_table({("main", "item()", HERE): 3}, steps).split()[-1] == shown


def test_work_is_left_out_unless_asked_for() -> None:
    counts = {("main", OPERATION, HERE): 3}
    assert counts_table(counts) == "no host sync"
    assert OPERATION in counts_table(counts, work=True)
