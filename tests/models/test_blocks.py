"""The geometry of blocks against a slow, obvious statement of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data.anchors import (
    BlockGeometry,
    anchor_candidates,
    context_limits,
    default_gamma,
    document_starts,
    sample_anchors,
    slot_labels,
)
from dflash.models.blocks import dense_attention_mask

QUICK = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def rows(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, int]:
    """ids, loss mask, document ids, anchors, block size."""
    length = draw(st.integers(2, 24))
    mask = np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    cuts = draw(st.lists(st.integers(1, length - 1), max_size=3))
    documents = (
        np.searchsorted(np.sort(cuts), np.arange(length), side="right").astype(np.int64)
        if cuts
        else np.zeros(length, np.int64)
    )
    return np.arange(100, 100 + length), mask, documents, draw(st.integers(1, 8)), draw(st.integers(2, 7))


def slow_candidates(mask: np.ndarray, documents: np.ndarray) -> list[int]:
    found = []
    for a in range(len(mask) - 1):
        if mask[a] and mask[a + 1] and documents[a] == documents[a + 1]:
            found.append(a)
    return found


def slow_slot(ids, mask, documents, a: int, kept: bool, k: int, gamma: float) -> tuple[int, float]:
    """Label and weight of slot k of the block at a."""
    position = a + k
    if not kept or position >= len(ids) or not mask[position] or documents[position] != documents[a]:
        return 0, 0.0
    return int(ids[position]), float(np.exp(-(k - 1) / gamma))


def slow_sees(
    a: int,
    kept: bool,
    start: int,
    window: int | None,
    block: int,
    slot: int,
    column: int,
    context: int,
    size: int,
) -> bool:
    """Whether a slot sees a column of `[context | all slots]`."""
    position = a + slot
    if column < context:
        if not kept or column < start or column >= a:
            return False
        return window is None or position - column < window
    other_block, other_slot = divmod(column - context, size)
    if other_block != block:
        return False
    return window is None or (other_slot <= slot and slot - other_slot < window)


@QUICK
@given(rows(), st.integers(0, 2**31))
def test_anchors_are_candidates_drawn_without_replacement(row, seed):
    _, mask, documents, count, _ = row
    anchors, keep = sample_anchors(mask, count, np.random.default_rng(seed), documents)
    candidates = slow_candidates(mask, documents)
    assert anchors.shape == keep.shape == (count,)
    assert keep.sum() == min(count, len(candidates))
    kept = anchors[keep].tolist()
    assert kept == sorted(set(kept))
    assert set(kept) <= set(candidates)
    assert not anchors[~keep].any()
    assert not keep[keep.sum() :].any(), "dummies stand last"


@QUICK
@given(rows(), st.integers(0, 2**31))
def test_labels_and_weights_equal_the_slow_ones(row, seed):
    ids, mask, documents, count, size = row
    geometry = BlockGeometry(count, size, gamma=3.0)
    anchors, keep = sample_anchors(mask, count, np.random.default_rng(seed), documents)
    labels, weights = slot_labels(ids, mask, anchors, keep, geometry, documents)
    for n in range(count):
        for k in range(1, size):
            label, weight = slow_slot(ids, mask, documents, anchors[n], keep[n], k, 3.0)
            assert labels[n, k - 1] == label
            assert weights[n, k - 1] == pytest.approx(weight, rel=1e-6)


@QUICK
@given(rows(), st.integers(0, 2**31))
def test_a_padded_batch_equals_its_rows(row, seed):
    ids, mask, documents, count, size = row
    geometry = BlockGeometry(count, size)
    anchors, keep = sample_anchors(mask, count, np.random.default_rng(seed), documents)
    alone = slot_labels(ids, mask, anchors, keep, geometry, documents)
    padding = 5
    padded = [np.stack([np.pad(array, (0, padding))] * 2) for array in (ids, mask)]
    beyond = np.stack([np.pad(documents, (0, padding), constant_values=99)] * 2)
    both = slot_labels(*padded, np.stack([anchors] * 2), np.stack([keep] * 2), geometry, beyond)
    for one, two in zip(alone, both, strict=True):
        np.testing.assert_array_equal(one, two[0])
        np.testing.assert_array_equal(one, two[1])


@QUICK
@given(rows(), st.integers(0, 2**31), st.sampled_from([None, 1, 3, 9, 100]))
def test_the_dense_mask_equals_the_slow_one(row, seed, window):
    _, mask, documents, count, size = row
    context = len(mask)
    anchors, keep = sample_anchors(mask, count, np.random.default_rng(seed), documents)
    starts = document_starts(anchors, documents)
    tensors = [torch.from_numpy(array)[None] for array in (anchors, keep, starts)]
    seen = dense_attention_mask(*tensors, context, size, window)[0]
    for n in range(count):
        for slot in range(size):
            row_of_mask = seen[n * size + slot].tolist()
            expected = [
                slow_sees(anchors[n], keep[n], starts[n], window, n, slot, column, context, size)
                for column in range(context + count * size)
            ]
            assert row_of_mask == expected
    assert seen.any(dim=1).all(), "no row is empty"


@pytest.mark.slow
@QUICK
@given(rows(), st.integers(0, 2**31), st.integers(1, 4))
def test_limits_hold_for_every_block_of_a_chunk(row, seed, chunk):
    _, mask, documents, count, _ = row
    context = len(mask)
    anchors, keep = sample_anchors(mask, count, np.random.default_rng(seed), documents)
    starts = document_starts(anchors, documents)
    limits = context_limits(anchors[None], keep[None], starts[None], context, chunk=chunk, grain=4)
    assert len(limits) == -(-count // chunk)
    for n in range(count):
        sure, reach = limits[n // chunk]
        seen = {c for c in range(context) if keep[n] and starts[n] <= c < anchors[n]}
        assert set(range(sure)) <= seen
        assert not any(c >= reach for c in seen)


def test_a_single_candidate_and_none():
    rng = np.random.default_rng(0)
    mask = np.array([False, True, True, False])
    anchors, keep = sample_anchors(mask, 3, rng)
    assert anchors.tolist() == [1, 0, 0]
    assert keep.tolist() == [True, False, False]
    anchors, keep = sample_anchors(np.array([True, False, True]), 2, rng)
    assert not keep.any()
    labels, weights = slot_labels(
        np.arange(3), np.array([True, False, True]), anchors, keep, BlockGeometry(2, 4)
    )
    assert not labels.any()
    assert not weights.any()


def test_the_last_block_may_be_partial():
    mask = np.ones(6, bool)
    anchors, keep = np.array([4]), np.array([True])
    labels, weights = slot_labels(np.arange(10, 16), mask, anchors, keep, BlockGeometry(1, 5))
    assert labels.tolist() == [[15, 0, 0, 0]]
    assert (weights > 0).tolist() == [[True, False, False, False]]


def test_every_candidate_is_drawn_equally_often():
    mask = np.ones(11, bool)
    rng = np.random.default_rng(0)
    drawn = np.zeros(11)
    for _ in range(4000):
        anchors, keep = sample_anchors(mask, 3, rng)
        drawn[anchors[keep]] += 1
    assert drawn[10] == 0
    # 1200 expected each; 6 standard deviations of a hypergeometric draw are 175.
    assert np.abs(drawn[:10] - 1200).max() < 175


def test_gamma_follows_the_paper():
    assert [default_gamma(size) for size in (8, 10, 16)] == [4.0, 5.0, 7.0]
    assert 5.0 < default_gamma(13) < 7.0
    assert default_gamma(2) == 1.0
    assert default_gamma(32) == 14.0
    np.testing.assert_allclose(BlockGeometry(1, 16).decay, np.exp(-np.arange(15) / 7.0), rtol=1e-6)
    assert anchor_candidates(np.array([True, True])).tolist() == [0]
