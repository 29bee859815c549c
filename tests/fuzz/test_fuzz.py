"""A few hundred inputs of each kind; `nox -s fuzz` gives the readers many more."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.__main__ import Fault, fuzz
from tests.fuzz.readers import READERS, Reader, one_line


def few() -> settings:
    """Fewer where other properties get fewer, too: an input of a reader is large."""
    return settings(
        max_examples=min(40, settings.default.max_examples // 2),
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_one_clear_line_or_a_right_result(reader):
    few()(given(reader.given)(reader.check))()


@pytest.mark.fault
def test_a_reader_that_breaks_is_found_with_its_smallest_input():
    def check(number: int) -> None:
        if number > 30:
            raise KeyError("planted")

    found = fuzz([Reader("planted", st.integers(0, 1000), check)], seconds=math.inf, examples=200, rounds=1)
    assert found.inputs > 0
    assert [(fault.reader, "KeyError: 'planted'" in fault.text) for fault in found.faults] == [
        ("planted", True)
    ]
    assert "31" in found.faults[0].text
    assert isinstance(found.faults[0], Fault)


@pytest.mark.fault
@pytest.mark.parametrize("text", ["two\nlines", "", "x" * 5000])
def test_a_message_that_is_not_one_line_is_a_fault(text):
    with pytest.raises(AssertionError):
        one_line(ValueError(text))


def test_readers_that_hold_are_tried_until_the_time_is_over():
    seen: list[int] = []
    found = fuzz([Reader("fine", st.integers(), seen.append)], seconds=math.inf, examples=50, rounds=2)
    assert found.inputs == len(seen) >= 100
    assert not found.faults
