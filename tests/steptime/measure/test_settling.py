"""The pilot: the shortest segment in which a wait costs what it costs in a long one."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime.measure.settling import (
    FLOOR,
    LENGTHS,
    NEAR,
    LengthCost,
    LengthPilot,
    Settled,
    lengths_for,
    shortest_settled,
)
from steptime.records.pairs import Request, Segment


def costs(*percent: float, error: float = 0.02) -> list[LengthCost]:
    pairs = zip(LENGTHS, percent, strict=False)
    return [LengthCost(steps, one / 100, error / 100, 20) for steps, one in pairs]


@pytest.mark.parametrize(
    ("percent", "steps", "settled"),
    [
        ((5.0, 5.0, 5.0, 5.0, 5.0, 5.0), 1, True),
        ((0.1, 2.0, 4.0, 4.9, 5.0, 5.0), 8, True),
        ((0.1, 0.2, 0.5, 1.0, 2.0, 4.0), 32, False),
        ((9.0, 6.0, 5.0, 5.0, 5.0, 5.0), 4, True),
        ((0.0, 0.05, 0.0, -0.05, 0.0, 0.0), 1, True),
        ((5.0, 1.0, 5.0, 5.0, 5.0, 5.0), 4, True),
    ],
)
def test_the_shortest_length_whose_cost_is_that_of_all_longer_ones(
    percent: tuple[float, ...], steps: int, settled: bool
) -> None:
    found = shortest_settled(costs(*percent)[::-1])
    assert (found.steps, found.settled) == (steps, settled)
    assert len(found.costs) == 6


def test_noise_does_not_pass_for_settled() -> None:
    found = shortest_settled(costs(5.0, 5.0, 5.0, 5.0, 5.0, 5.0, error=0.5))
    assert (found.steps, found.settled) == (32, False)
    assert found.why == "a wait's cost has not settled below 32 steps (5.00% +- 0.50%)"
    few = [LengthCost(steps, 0.05, math.inf, 2) for steps in LENGTHS]
    assert shortest_settled(few).steps == 32
    with pytest.raises(ValueError, match="no length"):
        shortest_settled([])


@given(
    st.lists(st.floats(0.0, 0.2), min_size=2, max_size=6),
    st.lists(st.floats(0.0, 0.01), min_size=6, max_size=6),
)
def test_no_longer_length_contradicts_what_has_settled(values: list[float], errors: list[float]) -> None:
    taken = [LengthCost(*one, 9) for one in zip(LENGTHS, values, errors, strict=False)]
    found = shortest_settled(taken)
    chosen = next(one for one in taken if one.steps == found.steps)
    longer = [one for one in taken if one.steps > found.steps]
    assert found.settled == bool(longer)
    assert all(abs(one.cost - chosen.cost) <= max(FLOOR, NEAR * one.cost) + 1e-12 for one in longer)


def test_lengths_fit_into_the_time() -> None:
    assert lengths_for(0.01, 30.0) == LENGTHS
    assert lengths_for(0.5, 30.0) == (1, 2, 4)
    assert lengths_for(60.0, 30.0) == (1, 2)


def device(request: Request, hidden_steps: int, generator: random.Random) -> Segment:
    """A GPU whose host needs `hidden_steps` steps to run ahead: only after them does a wait cost its 8%."""
    costly = max(0, request.steps - hidden_steps) * bool(request.on)
    seconds = (request.steps + 0.08 * costly) * 0.01 * math.exp(generator.gauss(0, 0.002))
    return Segment(tuple(request.on), request.steps, 100, seconds)


@pytest.mark.parametrize(("hidden", "steps"), [(0, 1), (1, 16)])
def test_the_pilot_finds_where_a_wait_stops_hiding(hidden: int, steps: int) -> None:
    now, generator = 0.0, random.Random(3)
    pilot = LengthPilot("pilot", 120.0, clock=lambda: now)
    for request in pilot.requests():
        segment = device(request, hidden, generator)
        now += segment.seconds
        pilot.on_segment(segment)
    found = pilot.decide()
    assert (found.steps, found.settled) == (steps, True)
    assert now == pytest.approx(120.0, abs=3.0)
    assert found.costs[-1].cost == pytest.approx(0.08, rel=0.1)


def test_where_no_host_runs_ahead_one_step_does_at_once() -> None:
    pilot = LengthPilot(None, 30.0)
    assert list(pilot.requests()) == []
    assert pilot.decide() == Settled(1, True, "no host runs ahead of its device: one step does")
