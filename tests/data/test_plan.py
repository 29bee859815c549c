from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data.plan import CyclePlan, EpochPlan, anchor_seed
from steptime.errors import UserError

BUCKETS = (16, 32, 64)
lengths = st.lists(st.integers(1, 64), min_size=1, max_size=80)


def epoch(plan: EpochPlan, number: int) -> list:
    first = number * plan.batches_per_epoch
    return [plan.spec(index) for index in range(first, first + plan.batches_per_epoch)]


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(1, 9), st.integers(0, 2**32))
def test_each_sample_once_and_little_filler(sizes, batch_size, seed):
    plan = EpochPlan(sizes, BUCKETS, batch_size, seed)
    for number in (0, 1, 7):
        specs = epoch(plan, number)
        counts = Counter(sample for spec in specs for sample in spec.sample_ids)
        assert set(counts) == set(range(len(sizes)))
        places = sum(counts.values())
        assert places == batch_size * plan.batches_per_epoch
        assert places - len(sizes) < batch_size
        if len(sizes) >= batch_size:  # filler is never in the batch twice unless there is nothing else
            assert all(len(set(spec.sample_ids)) == batch_size for spec in specs)


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(1, 9), st.integers(0, 2**32))
def test_bucket_is_the_shortest_for_its_longest_sample(sizes, batch_size, seed):
    plan = EpochPlan(sizes, BUCKETS, batch_size, seed)
    needless = 0
    for spec in epoch(plan, 0):
        own = [next(bucket for bucket in BUCKETS if bucket >= sizes[sample]) for sample in spec.sample_ids]
        assert max(sizes[sample] for sample in spec.sample_ids) <= spec.bucket
        needless += sum(bucket < spec.bucket for bucket in own)
    # Only what is left of a bucket moves up, and the filler of the one batch that is not full.
    assert needless <= (batch_size - 1) * len(BUCKETS)


@settings(max_examples=30, deadline=None)
@given(
    lengths, st.integers(1, 9), st.integers(0, 2**32), st.lists(st.integers(0, 500), min_size=1, max_size=20)
)
def test_spec_is_pure(sizes, batch_size, seed, places):
    """Any order of asking, any number of plans: one answer."""
    plan, other = EpochPlan(sizes, BUCKETS, batch_size, seed), EpochPlan(sizes, BUCKETS, batch_size, seed)
    found = {place: plan.spec(place) for place in places}
    assert all(other.spec(place) == found[place] for place in sorted(places, reverse=True))
    assert all(spec.index == place for place, spec in found.items())


def test_epochs_and_seeds_differ():
    plan = EpochPlan([10] * 50, BUCKETS, 4, 0)
    assert [spec.sample_ids for spec in epoch(plan, 0)] != [spec.sample_ids for spec in epoch(plan, 1)]
    assert [spec.sample_ids for spec in epoch(plan, 0)] != [
        spec.sample_ids for spec in epoch(EpochPlan([10] * 50, BUCKETS, 4, 1), 0)
    ]


def test_fewer_samples_than_a_batch():
    plan = EpochPlan([5, 20], BUCKETS, 5, 0)
    assert plan.batches_per_epoch == 1
    spec = plan.spec(3)
    assert len(spec.sample_ids) == 5
    assert set(spec.sample_ids) == {0, 1}
    assert spec.bucket == 32


def test_lengths_stay_mixed():
    """In every tenth of an epoch each bucket has about its share of batches."""
    rng = np.random.default_rng(0)
    sizes = np.concatenate(
        [rng.integers(1, 17, 4000), rng.integers(17, 33, 2000), rng.integers(33, 65, 2000)]
    )
    plan = EpochPlan(sizes, BUCKETS, 4, 0)
    buckets = [spec.bucket for spec in epoch(plan, 0)]
    for part in np.array_split(buckets, 10):
        shares = [float(np.mean(part == bucket)) for bucket in BUCKETS]
        assert shares == pytest.approx([0.5, 0.25, 0.25], abs=0.03)


def test_padding_is_low():
    sizes = np.random.default_rng(0).integers(1, 65, 3000)
    plan = EpochPlan(sizes, BUCKETS, 8, 0)
    real = sum(sizes[sample] for spec in epoch(plan, 0) for sample in spec.sample_ids)
    padded = sum(spec.bucket * len(spec.sample_ids) for spec in epoch(plan, 0))
    assert real / padded > 0.7  # without buckets it is a half


def test_refuses_what_cannot_be_planned():
    with pytest.raises(UserError, match="data set is empty"):
        EpochPlan([], BUCKETS, 4, 0)
    with pytest.raises(UserError, match=r"65 tokens, the longest of data.buckets is 64"):
        EpochPlan([65], BUCKETS, 4, 0)


@given(st.integers(1, 12), st.integers(0, 100))
def test_cycle_repeats_all_but_the_index(length, place):
    plan = EpochPlan([3, 20, 40, 5, 6], BUCKETS, 2, 9)
    cycle = CyclePlan(plan, length)
    spec, source = cycle.spec(place), plan.spec(place % length)
    assert spec.index == place
    assert (spec.sample_ids, spec.bucket, spec.anchor_seed) == (
        source.sample_ids,
        source.bucket,
        source.anchor_seed,
    )


def test_anchor_seeds_differ_by_place_and_seed():
    seeds = {anchor_seed(seed, place) for seed in range(50) for place in range(200)}
    assert len(seeds) == 50 * 200
    assert all(0 <= value < 2**63 for value in seeds)
