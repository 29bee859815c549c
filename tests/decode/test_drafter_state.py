"""Drafting with a memory of keys and values gives what training's forward pass gives."""

from __future__ import annotations

import pytest
import torch

from dflash.decode.drafter_state import DrafterState
from tests.decode import parts

B = 8
TEXT = parts.prompts((40,), seed=5)[0]


@pytest.fixture(params=[(0, 2048), (1, 6), (2, 20)], ids=["full", "one sliding", "all sliding"])
def drafter(request, target_of):
    sliding, window = request.param
    return parts.make_drafter(target_of("full"), B, sliding, window)


@pytest.fixture
def features(target_of):
    target = target_of("full")
    return torch.cat(target.taps(torch.tensor([TEXT])), dim=-1)


def trained(drafter, target, features, anchor):
    """Hidden states of the block at `anchor`, as in training: the whole text is there, the mask hides the
    rest."""
    anchors = torch.tensor([[anchor]])
    with torch.no_grad():
        return drafter(
            features,
            torch.tensor([TEXT]),
            anchors,
            torch.ones_like(anchors, dtype=torch.bool),
            torch.zeros_like(anchors),
            target.embedding,
        )[0, 0]


def drafting(drafter, target, features, pieces):
    """A state that took the features piece by piece."""
    state = DrafterState(drafter, target.embedding, target.head, 1)
    state.prefill(features[:, : pieces[0]], [pieces[0]])
    start = pieces[0]
    for piece in pieces[1:]:
        # A pass gives features of rejected tokens too: here of the next ones, which must leave no trace.
        state.append(features[:, start : start + piece + 3], [piece])
        start += piece
    return state


@pytest.mark.parametrize("pieces", [(20,), (3, 1, 8, 5, 3)], ids=["at once", "piece by piece"])
def test_inference_is_training(drafter, target_of, features, pieces):
    target = target_of("full")
    state = drafting(drafter, target, features, pieces)
    anchor = sum(pieces)
    with torch.no_grad():
        hidden = state.hidden(torch.tensor([TEXT[anchor]]), B)[0]
    expected = trained(drafter, target, features, anchor)
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-5)
    # The comparison has eyes: the block one further on is another one.
    assert (hidden - trained(drafter, target, features, anchor + 1)).abs().max() > 0.05


def test_rows_of_different_lengths(drafter, target_of, features):
    target = target_of("full")
    lengths = [20, 4, 12]
    padded = torch.full((3, 20, features.shape[-1]), 7.0)
    for row, length in enumerate(lengths):
        padded[row, 20 - length :] = features[0, :length]
    state = DrafterState(drafter, target.embedding, target.head, 3)
    kept = [2, 5, 1]
    with torch.no_grad():
        state.prefill(padded, lengths)
        fresh = torch.stack([features[0, length : length + B] for length in lengths])
        state.append(fresh, kept)
        anchors = [length + count for length, count in zip(lengths, kept, strict=True)]
        together = state.hidden(torch.tensor([TEXT[anchor] for anchor in anchors]), B)
        for row, anchor in enumerate(anchors):
            torch.testing.assert_close(
                together[row], trained(drafter, target, features, anchor), rtol=1e-4, atol=1e-5
            )
        state.select([2, 1])
        fewer = state.hidden(torch.tensor([TEXT[anchors[2]], TEXT[anchors[1]]]), B)
    torch.testing.assert_close(fewer, together[[2, 1]], rtol=1e-4, atol=1e-5)


def test_the_context_ends_before_the_anchor(drafter, target_of, features):
    """Planted: a context that holds the anchor's own feature gives another block."""
    target = target_of("full")
    anchor = 20
    state = drafting(drafter, target, features, (anchor + 1,))
    state.lengths = [anchor]  # positions as they should be, one column too many
    state._columns = anchor + 1
    with torch.no_grad():
        state._mask = lambda size, window: None
        hidden = state.hidden(torch.tensor([TEXT[anchor]]), B)[0]
    assert (hidden - trained(drafter, target, features, anchor)).abs().max() > 0.01
