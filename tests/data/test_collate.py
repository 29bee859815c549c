from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data.anchors import BlockGeometry
from dflash.data.batch import BatchSpec, Sample
from dflash.data.collate import Collator
from dflash.data.dataset import Dataset, has_pair, pack


@st.composite
def samples(draw, longest: int = 24, most: int = 5):
    made = []
    for number in range(draw(st.integers(1, most))):
        length = draw(st.integers(2, longest))
        mask = np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)))
        if not has_pair(mask):
            mask[:2] = True
        ids = np.arange(1, length + 1, dtype=np.int32) + 100 * number
        made.append(Sample(ids, mask, f"file:{number}"))
    return made


def packed(made, longest):
    return pack(made, np.array([len(sample.input_ids) for sample in made]), longest)


def check(batch, rows, geometry):
    """The obvious statement of a batch: loops over rows, anchors and slots."""
    weights = 0.0
    for row, sample in enumerate(rows):
        length = len(sample.input_ids)
        documents = sample.document_ids if sample.document_ids is not None else np.zeros(length, int)
        assert batch.input_ids[row, :length].tolist() == sample.input_ids.tolist()
        assert not batch.input_ids[row, length:].any()
        fit = [
            a
            for a in range(length - 1)
            if sample.loss_mask[a] and sample.loss_mask[a + 1] and documents[a] == documents[a + 1]
        ]
        kept = [int(a) for a, keep in zip(batch.anchors[row], batch.keep[row], strict=True) if keep]
        assert len(kept) == min(len(fit), geometry.anchors)
        assert kept == sorted(set(kept))
        assert set(kept) <= set(fit)
        for place in range(geometry.anchors):
            a = int(batch.anchors[row, place])
            if not batch.keep[row, place]:
                assert a == 0
                assert place >= len(kept)
                assert not batch.weights[row, place].any()
                continue
            assert int(batch.document_start[row, place]) == documents.tolist().index(documents[a])
            for k in range(1, geometry.block_size):
                counted = a + k < length and sample.loss_mask[a + k] and documents[a + k] == documents[a]
                weight = np.exp(-(k - 1) / geometry.gamma) if counted else 0.0
                assert abs(float(batch.weights[row, place, k - 1]) - weight) < 1e-6
                assert int(batch.labels[row, place, k - 1]) == (
                    int(sample.input_ids[a + k]) if counted else 0
                )
                weights += weight
    assert abs(batch.weight_sum - weights) < 1e-4
    assert batch.lengths == tuple(len(sample.input_ids) for sample in rows)
    assert batch.tokens == sum(batch.lengths)
    assert batch.padded_tokens == batch.input_ids.numel()
    assert batch.loss_tokens == sum(int(sample.loss_mask.sum()) for sample in rows)
    assert batch.supervised_slots == int((batch.weights > 0).sum())


@settings(max_examples=60, deadline=None)
@given(samples(), st.integers(1, 12), st.integers(2, 8), st.integers(0, 2**62))
def test_batch_equals_the_obvious_reference(made, anchors, block, seed):
    geometry = BlockGeometry(anchors, block)
    spec = BatchSpec(0, seed, tuple(range(len(made))), 24)
    check(Collator(Dataset(made), geometry)(spec), made, geometry)


@settings(max_examples=60, deadline=None)
@given(samples(longest=10, most=8), st.integers(1, 12), st.integers(2, 8), st.integers(0, 2**62))
def test_packed_batch_equals_the_obvious_reference(made, anchors, block, seed):
    rows = packed(made, 24)
    geometry = BlockGeometry(anchors, block)
    batch = Collator(Dataset(rows), geometry)(BatchSpec(0, seed, tuple(range(len(rows))), 24))
    check(batch, list(rows), geometry)
    assert batch.documents is not None
    apart = batch.input_ids.reshape(-1)[batch.documents.gather]
    assert torch.equal(apart.flatten()[batch.documents.scatter].view_as(batch.input_ids), batch.input_ids)
    padding = torch.arange(24) >= torch.tensor(batch.lengths)[:, None]
    of_padding = padding.flatten()[batch.documents.gather]
    assert torch.equal(of_padding.any(dim=1), of_padding.all(dim=1)), "padding is in no document"


def test_same_spec_same_batch_and_other_seed_other_anchors():
    rows = [Sample(np.arange(50, dtype=np.int32), np.ones(50, bool), "a:1")]
    collate = Collator(Dataset(rows), BlockGeometry(8, 4))
    one, same, other = (collate(BatchSpec(index, seed, (0,), 64)) for index, seed in ((0, 5), (9, 5), (0, 6)))
    for name in ("input_ids", "anchors", "keep", "labels", "weights", "document_start"):
        assert torch.equal(getattr(one, name), getattr(same, name))
    assert not torch.equal(one.anchors, other.anchors)
    assert (
        one.input_ids.dtype
        == one.anchors.dtype
        == one.labels.dtype
        == one.document_start.dtype
        == torch.int64
    )
    assert one.keep.dtype == torch.bool
    assert one.weights.dtype == torch.float32
    assert one.documents is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 16), min_size=1, max_size=40))
def test_pack_keeps_every_document_whole(lengths):
    made = [
        Sample(np.full(length, number, np.int32), np.ones(length, bool), f"f:{number}")
        for number, length in enumerate(lengths)
    ]
    rows = packed(made, 16)
    seen = []
    for row in rows:
        assert len(row.input_ids) <= 16
        assert row.document_ids is not None
        assert row.document_ids[0] == 0
        for document in range(row.document_ids[-1] + 1):
            part = row.input_ids[row.document_ids == document]
            assert len(set(part.tolist())) == 1
            assert len(part) == lengths[part[0]]
            seen.append(int(part[0]))
    assert sorted(seen) == list(range(len(lengths)))
    # Best fit of the longest first never leaves two rows that would fit into one.
    sizes = sorted(len(row.input_ids) for row in rows)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > 16
