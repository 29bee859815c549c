"""Traces of losses: what is called equal, what rounding, and what neither."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime.statistics.traces import ROUNDING, compare

TRACE = (6.25, 6.125, 5.0)
LOSSES = st.lists(st.floats(0.01, 20.0, allow_nan=False), min_size=1, max_size=8)


@given(LOSSES, st.sampled_from(sorted(ROUNDING)))
def test_a_trace_equals_itself(trace: list[float], dtype: str) -> None:
    assert compare(trace, list(trace), dtype).kind == "equal"


@given(LOSSES, st.data(), st.sampled_from(sorted(ROUNDING)))
def test_one_loss_moved_is_rounding_up_to_the_bound_and_different_past_it(
    trace: list[float], data: st.DataObject, dtype: str
) -> None:
    step = data.draw(st.integers(0, len(trace) - 1))
    for factor, kind in ((0.9, "rounding"), (1.1, "different")):
        moved = list(trace)
        moved[step] *= 1.0 + factor * ROUNDING[dtype]
        for pair in ((trace, moved), (moved, trace)):
            found = compare(*pair, dtype)
            assert (found.kind, found.step) == (kind, step)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("second", "step"),
    [
        ((6.25, math.nan, 5.0), 1),
        ((6.25, math.inf, 5.0), 1),
        ((6.25, 6.125), 2),
        ((), 0),
        ((6.25, 6.125, 5.1), 2),
        ((0.0, 6.125, 5.0), 0),
    ],
)
def test_what_is_not_rounding(second: tuple[float, ...], step: int) -> None:
    for dtype in ROUNDING:
        for one, other in ((TRACE, second), (second, TRACE)):
            found = compare(one, other, dtype)
            assert (found.kind, found.step) == ("different", step)
            assert f"step {step}" in found.text


def test_nothing_beside_nothing_is_no_equality() -> None:
    assert compare((), (), "float32").kind == "different"


def test_the_same_nan_is_the_same_loss() -> None:
    assert compare((1.0, math.nan), (1.0, math.nan), "float32").kind == "equal"


def test_another_order_of_the_same_sum_is_rounding() -> None:
    """What it is for: a mean of slot losses, added up in two orders."""
    losses = np.random.default_rng(0).random(4096, dtype=np.float32) * 12
    orders = [losses, losses[::-1], np.sort(losses)]
    means = [float(np.cumsum(order)[-1] / 4096) for order in orders]
    kinds = {compare(means[:1], [other], "float32").kind for other in means[1:]}
    assert kinds == {"rounding"}
    shorter = [float(losses[:-8].mean())]
    assert compare(means[:1], shorter, "float32").kind == "different", "eight slots left out"
