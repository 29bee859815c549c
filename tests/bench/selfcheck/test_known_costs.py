"""Known costs are found at their size by the pairs of their layer, on a clock that only moves when told
to."""

from __future__ import annotations

import math

import pytest

from bench.records.pairs import PLACEBO, Layer
from bench.selfcheck.known_costs import INJECTIONS, Found, parts, run, table
from bench.subjects.spin import Noise
from bench.subjects.spin_pairs import Cost, SpinPairs, cost_of


def subject(noise: Noise, **costs: Cost) -> SpinPairs:
    return SpinPairs({one.name: cost_of(one) for one in INJECTIONS} | costs, noise=noise, groups=4)


def test_all_are_found_and_the_placebo_is_at_zero() -> None:
    light = subject(Noise(step=0.01, slow=0.01, seed=1))
    found = run(light, parts(light.periods, plants=()), 400.0)
    assert {one.switch for one in found} == {*(one.label for one in INJECTIONS), PLACEBO}
    for one in found:
        truth = 20.0 if one.switch == "target 20%" else one.truth
        assert abs(one.estimate - truth) < 4.5 * one.error + 1e-6, one
        assert one.uncovered == 0
    sizes = {one.switch: one.error for one in found if one.part == "path"}
    assert max(sizes.values()) < 0.2, "and so a cost of 1% is not one of 2%"
    lengths = {one.part: one.steps for one in found}
    assert lengths["tick"] < lengths["flush"] < lengths["late"]


@pytest.mark.fault
def test_a_cost_in_the_wrong_layer_is_not_found_in_its_own() -> None:
    light = subject(Noise(step=0.01, slow=0.0, seed=2))
    light.costs["tick 2%"] = Cost()
    found = run(light, [part for part in parts(light.periods, plants=()) if part.layer is Layer.TICK], 200.0)
    one = next(one for one in found if one.switch == "tick 2%")
    assert abs(one.estimate) < 4.5 * one.error < one.truth


def test_the_table_leaves_an_unknown_truth_open() -> None:
    lines = table(
        [Found("target", "x", math.nan, 3.0, 1.0, 20, 8, 0), Found("tick", "y", 20.0, 19.0, 1.0, 20, 2, 1)]
    )
    assert "| target | x        | %      |         | 3.00 +- 1.96  |" in lines
    assert "| tick   | y        | ms     | 20      | 19.00 +- 1.96 |" in lines
