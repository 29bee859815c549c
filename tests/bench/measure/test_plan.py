"""Arms, rounds and sizing: pure, so checked against what they promise rather than against examples."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.measure.plan import MIN_SEGMENT_S, choose_collectors, make_arms, one_round, rounds, size
from bench.progress import human_time
from bench.records.types import ALL, OFF, OFF_AGAIN
from bench.statistics.stopping import MIN_ROUNDS
from steptime.errors import UserError

SIX = ("profile", "gpu", "pipeline", "workers", "batch", "cuda")


def test_arms_of_six_collectors() -> None:
    arms = {arm.name: arm.collectors for arm in make_arms(SIX)}
    assert next(iter(arms)) == OFF
    assert list(arms)[-1] == OFF_AGAIN
    assert arms[OFF] == arms[OFF_AGAIN] == frozenset()
    assert arms[ALL] == frozenset(SIX)
    for name in SIX:
        assert arms[f"only:{name}"] == {name}
        assert arms[f"without:{name}"] == set(SIX) - {name}
    assert len(arms) == 15


def test_one_collector_has_no_without_arm_because_that_would_be_off() -> None:
    assert [arm.name for arm in make_arms(["gpu"])] == [OFF, "only:gpu", ALL, OFF_AGAIN]


@pytest.mark.parametrize("collectors", [[], ["gpu", "gpu"]])
def test_an_empty_or_double_plan_is_refused(collectors: list[str]) -> None:
    with pytest.raises(UserError):
        make_arms(collectors, together=True)
    with pytest.raises(UserError):
        make_arms(collectors)


def test_controls_are_repeated_about_the_root_of_the_number_of_contrasts() -> None:
    counts = Counter(arm.name for arm in one_round(make_arms(SIX)))
    assert counts[OFF] == counts[ALL] == 2
    assert all(count == 1 for name, count in counts.items() if name not in (OFF, ALL))
    assert set(Counter(arm.name for arm in one_round(make_arms(SIX, marginal=False))).values()) == {1}


def test_every_round_holds_every_arm_in_an_order_of_its_own() -> None:
    arms = make_arms(SIX)
    first = list(islice(rounds(arms, seed=3), 20))
    assert all(Counter(order) == Counter(one_round(arms)) for order in first)
    assert len(set(first)) == 20
    assert first == list(islice(rounds(arms, seed=3), 20))
    assert first != list(islice(rounds(arms, seed=4), 20))


def test_no_arm_is_favoured_by_its_place() -> None:
    arms = make_arms(("a", "b"))
    places: dict[str, list[int]] = {}
    for order in islice(rounds(arms, seed=0), 600):
        for place, arm in enumerate(order):
            places.setdefault(arm.name, []).append(place)
    middle = (len(one_round(arms)) - 1) / 2
    assert all(abs(sum(found) / len(found) - middle) < 0.3 for found in places.values())


@given(
    step_s=st.floats(1e-4, 5.0),
    cycle=st.integers(1, 64),
    segments=st.integers(1, 40),
    time_s=st.floats(1.0, 3600.0),
    washout=st.integers(0, 10),
)
def test_sizing_keeps_its_promises(
    step_s: float, cycle: int, segments: int, time_s: float, washout: int
) -> None:
    found = size(step_s=step_s, cycle=cycle, segments_per_round=segments, time_s=time_s, washout=washout)
    assert found.rounds >= MIN_ROUNDS
    assert found.steps == found.cycles * cycle >= cycle
    assert found.total_s == pytest.approx(found.rounds * segments * (found.steps + washout) * step_s)
    if found.fits:
        assert found.total_s <= time_s * 1.01
    else:
        assert found.cycles == 1, "segments get as short as may be before the time is overrun"
        assert found.rounds == MIN_ROUNDS
    if found.cycles > 1:
        assert (found.cycles - 1) * cycle * step_s < MIN_SEGMENT_S, "no longer than the least length needs"


def test_a_segment_is_one_cycle_unless_steps_are_very_short() -> None:
    found = size(step_s=0.07, cycle=4, segments_per_round=17, time_s=240.0, washout=1)
    assert found.steps == 4
    assert found.segment_s == pytest.approx(0.28)
    assert "17 segments a round of 4 steps (0.28 s)" in found.describe(15)
    assert (
        size(step_s=1e-5, cycle=4, segments_per_round=17, time_s=240.0, washout=1).segment_s >= MIN_SEGMENT_S
    )


def test_a_plan_that_does_not_fit_says_so() -> None:
    found = size(step_s=1.0, cycle=8, segments_per_round=17, time_s=60.0, washout=2)
    assert not found.fits
    assert "more than asked" in found.describe(15)


@pytest.mark.parametrize(
    "wrong", [{"step_s": 0.0}, {"cycle": 0}, {"segments_per_round": 0}, {"time_s": 0.0}, {"washout": -1}]
)
def test_sizing_refuses_nonsense(wrong: dict[str, float]) -> None:
    good = {"step_s": 0.1, "cycle": 4, "segments_per_round": 5, "time_s": 60.0, "washout": 1}
    with pytest.raises(ValueError):
        size(**(good | wrong))  # type: ignore[arg-type]


def test_only_keeps_the_subjects_order_and_names_the_nearest() -> None:
    assert choose_collectors(SIX, ()) == SIX
    assert choose_collectors(SIX, ("cuda", "profile")) == ("profile", "cuda")
    with pytest.raises(UserError, match="did you mean 'profile'"):
        choose_collectors(SIX, ("profil",))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (60, "1 min 00 s"), (200.2, "3 min 20 s")]
)
def test_times_for_people(seconds: float, text: str) -> None:
    assert human_time(seconds) == text
