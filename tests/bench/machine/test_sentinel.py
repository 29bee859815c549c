"""The sentinel: steady where the machine is, and said when it moved."""

from __future__ import annotations

import pytest

from bench.machine.sentinel import Sentinel, run_sentinel


def test_it_takes_a_measurable_time() -> None:
    assert 0.001 < run_sentinel() < 5.0


@pytest.mark.parametrize(
    ("after_s", "moved"), [(1.0, False), (1.049, False), (0.96, False), (1.06, True), (0.90, True)]
)
def test_it_moved_when_it_changed_by_more_than_five_percent(after_s: float, moved: bool) -> None:
    assert bool(Sentinel(1.0, after_s).moved()) is moved
