"""The sentinel: steady where the machine is, and said when a device of it moved."""

from __future__ import annotations

import pytest

from steptime.machine import sentinel
from steptime.machine.sentinel import Sentinel, run_sentinel
from tests.clock import Clock


def test_it_takes_a_measurable_time() -> None:
    times = run_sentinel(("cpu", "cpu:1"))
    assert set(times) == {"cpu"}
    assert 0.001 < times["cpu"] < 5.0


@pytest.mark.parametrize(
    ("after_s", "moved"), [(1.0, False), (1.049, False), (0.96, False), (1.06, True), (0.90, True)]
)
def test_it_moved_when_it_changed_by_more_than_five_percent(after_s: float, moved: bool) -> None:
    assert bool(Sentinel({"cpu": 1.0}, {"cpu": after_s}).moved()) is moved


@pytest.mark.fault
def test_a_gpu_that_slows_by_a_tenth_shows_beside_a_slow_cpu(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """The CPU's work takes ten times as long as the GPU's: in one sum the tenth would be one in a hundred."""
    seconds = {"cpu": 0.020, "cuda:0": 0.002, "cuda:1": 0.002}
    monkeypatch.setattr(
        sentinel,
        "make_works",
        lambda devices: {name: lambda name=name: clock.advance(seconds[name]) for name in ("cpu", *devices)},
    )
    before = run_sentinel(("cuda:0", "cuda:1"))
    assert before == pytest.approx(seconds)
    seconds["cuda:1"] *= 1.1
    found = Sentinel(before, run_sentinel(("cuda:0", "cuda:1")))
    assert found.moved() == (
        "the sentinel workload moved while measuring (cuda:1 by +10.0%): the machine did not stand still"
    )
    assert Sentinel.of_receipt(found.as_receipt()) == found


def test_receipts_with_one_time_for_all_are_still_read() -> None:
    assert "together by +50.0%" in Sentinel.of_receipt({"before_s": 1.0, "after_s": 1.5}).moved()
