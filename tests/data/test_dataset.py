"""Samples that are made when they are asked for answer as a list does."""

from __future__ import annotations

import numpy as np
import pytest

from dflash.data.dataset import FlatBuilder, pack

LENGTHS = (3, 5, 2, 4, 6)


@pytest.fixture(params=["flat", "packed"])
def made(request):
    """Five samples, or the four rows that they make; and how many there are."""
    builder = FlatBuilder()
    for number, length in enumerate(LENGTHS):
        builder.add(np.full(length, number), np.ones(length), "file", number)
    flat = builder.build()
    return (flat, 5) if request.param == "flat" else (pack(flat, flat.lengths, 6), 4)


def ids(samples):
    return [sample.input_ids.tolist() for sample in samples]


def test_indices_from_either_end_and_slices_are_those_of_a_list(made):
    samples, count = made
    listed = ids(samples)
    assert len(samples) == len(listed) == count
    for index in range(-count, count):
        assert samples[index].input_ids.tolist() == listed[index]
    for cut in (slice(1, 3), slice(None, None, -2), slice(-2, 99)):
        assert ids(samples[cut]) == listed[cut]


@pytest.mark.fault
def test_an_index_outside_is_refused(made):
    samples, count = made
    for index in (count, -count - 1):
        with pytest.raises(IndexError):
            samples[index]
