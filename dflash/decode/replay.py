"""What training would have said of a text: the drafter's blocks at given places, each from the true tokens
before it, and the target's own choice at every place.

This is the pass of training (all blocks of a text at one time, nothing committed step by step), so a
difference between it and decoding at the same places is a fault of one of the two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from dflash.models.drafter import Drafter
from dflash.models.target import Target, stack_taps

_BLOCKS = 32  # blocks drafted in one pass
_PLACES = 256  # places whose logits exist at one time


@dataclass(frozen=True)
class Replayed:
    """A text read again.

    Attributes:
        anchors: int64 `[blocks]`, where the blocks start.
        right: bool `[blocks, B-1]`: the draft of slot k is the token at `anchor + k`.
        judged: bool `[blocks, B-1]`: that token is there and supervised.
        chosen: bool `[tokens]`: the supervised tokens that the target itself would have chosen.
    """

    anchors: np.ndarray
    right: np.ndarray
    judged: np.ndarray
    chosen: np.ndarray


@torch.no_grad()
def replay(
    target: Target,
    drafter: Drafter,
    ids: Sequence[int],
    mask: Sequence[bool],
    anchors: Sequence[int] | None = None,
) -> Replayed:
    """Draft every block of one text.

    Args:
        ids: the whole text, prompt and answer.
        mask: true on the answer's tokens.
        anchors: where blocks start; None: wherever training may start one.
    """
    from dflash.data.anchors import anchor_candidates

    device = target.device.torch
    supervised = np.asarray(mask, bool)
    starts = anchor_candidates(supervised) if anchors is None else np.asarray(anchors, np.int64)
    text = torch.tensor([list(ids)], device=device)
    taps, last = target.taps_and_last(text)
    guesses = _draft(target, drafter, stack_taps(taps), text, starts)
    reach = starts[:, None] + np.arange(1, drafter.shape.block_size)
    inside = np.minimum(reach, len(supervised) - 1)
    return Replayed(
        anchors=starts,
        right=guesses == np.asarray(ids)[inside],
        judged=(reach < len(supervised)) & supervised[inside],
        chosen=_chosen(target, last[0], ids, supervised),
    )


def _draft(
    target: Target, drafter: Drafter, features: torch.Tensor, text: torch.Tensor, starts: np.ndarray
) -> np.ndarray:
    """Greedy drafts int64 `[blocks, B-1]`."""
    drafts = []
    features = features.to(drafter.fc.weight.dtype)
    for first in range(0, len(starts), _BLOCKS):
        places = torch.from_numpy(starts[first : first + _BLOCKS])[None].to(text.device)
        kept = torch.ones_like(places, dtype=torch.bool)
        hidden = drafter(features, text, places, kept, torch.zeros_like(places), target.embedding)[0]
        drafts.append(F.linear(hidden.to(target.head.dtype), target.head).argmax(dim=-1).cpu().numpy())
    if not drafts:
        return np.zeros((0, drafter.shape.block_size - 1), np.int64)
    return np.concatenate(drafts)


def _chosen(target: Target, last: torch.Tensor, ids: Sequence[int], supervised: np.ndarray) -> np.ndarray:
    """Whether the target's likeliest token is the one that stands there, bool `[supervised tokens]`."""
    places = np.flatnonzero(supervised)
    places = places[places > 0]
    tokens = np.asarray(ids)[places]
    best = [
        F.linear(last[torch.from_numpy(part - 1).to(last.device)], target.head).argmax(dim=-1).cpu().numpy()
        for part in np.array_split(places, max(1, -(-len(places) // _PLACES)))
    ]
    return np.concatenate(best) == tokens
