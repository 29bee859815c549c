"""What travels through the pipeline: a sample, its place in the plan, a batch in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from dflash.data.documents import DocumentRows


@dataclass(frozen=True, slots=True)
class Sample:
    """One tokenised conversation.

    Attributes:
        input_ids: int32 `[length]`.
        loss_mask: bool `[length]`, true on the assistant's tokens.
        origin: `file:line`, for messages.
        document_ids: int32 `[length]` ascending from 0 when several conversations share the row, else None.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    origin: str
    document_ids: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """A place in the plan: which samples, padded to which length. Pure function of the seed.

    Attributes:
        index: place in the plan, from 0, never repeats.
        anchor_seed: seeds the anchors; equal seeds and samples give equal batches.
        sample_ids: rows of the data set.
        bucket: padded length, tokens.
    """

    index: int
    anchor_seed: int
    sample_ids: tuple[int, ...]
    bucket: int


@dataclass(frozen=True, slots=True)
class BatchWork:
    """What a batch asks for; padding and dropped blocks are no work that anybody asked for.

    Attributes:
        lengths: real tokens of each conversation, those of packed rows one by one.
        blocks: kept ones.
        pairs, sliding_pairs: slots times the columns that they see (`anchors.visible_pairs`), in one
            full-attention layer and in one sliding layer.
    """

    lengths: tuple[int, ...]
    blocks: int
    pairs: int
    sliding_pairs: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch in host memory (pinned when it will move to a GPU), with everything the host must know of it.

    The anchors and their weights are made here, on the host, from the host's mask: so no worker ever reads a
    device value to know how many there are, any drafter gets the same anchors for the same batch, and a
    resumed run needs no generator's state.

    Attributes:
        input_ids: int64 `[batch, length]`, right-padded with 0.
        anchors: int64 `[batch, anchors]`, ascending; 0 where not kept.
        keep: bool `[batch, anchors]`, false for dummy anchors.
        labels: int64 `[batch, anchors, block-1]`: the token at `anchor + k` for k = 1..block-1, 0 where
            weight is 0.
        weights: float32 `[batch, anchors, block-1]`: exp(-(k-1)/gamma) where supervised, else 0.
        document_start: int64 `[batch, anchors]` first position of the anchor's document (0 unless packed).
        documents: packed rows taken apart for the target; None unless packed.
        weight_sum: sum of `weights`, a host float: the loss's denominator.
        lengths: real tokens of each row.
        tokens, loss_tokens: real and supervised tokens of the batch; padded_tokens = batch * length.
        supervised_slots: count of non-zero weights.
        context_limits: how much context neighbouring blocks see (`anchors.context_limits`), so that work can
            be saved without reading an anchor back; None: not known.
        flops: what it asks of a target and of a drafter (`models.flops`); 0 where nobody counts.
    """

    spec: BatchSpec
    input_ids: torch.Tensor
    anchors: torch.Tensor
    keep: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    document_start: torch.Tensor
    documents: DocumentRows | None
    weight_sum: float
    lengths: tuple[int, ...]
    tokens: int
    padded_tokens: int
    loss_tokens: int
    supervised_slots: int
    context_limits: tuple[tuple[int, int], ...] | None = None
    flops: tuple[int, int] = (0, 0)
