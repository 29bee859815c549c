"""Where blocks lie and what they predict, on the host: pure functions of numpy arrays, free of any model.

A block starts at an anchor `a`: slot 0 holds the token at `a`, slots k = 1..B-1 hold mask tokens and predict
the tokens at `a + k` (no shift). Paper sections 3-4; the reference's 1.6 and 1.8. The anchors are drawn where
the batch is collated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_GAMMAS = {8: 4.0, 10: 5.0, 16: 7.0}


def default_gamma(block_size: int) -> float:
    """The paper's decay for its block sizes 8, 10 and 16; straight lines between and beyond them, at least
    1."""
    sizes = sorted(_GAMMAS)
    if block_size <= sizes[0]:
        return max(1.0, _GAMMAS[sizes[0]] * block_size / sizes[0])
    if block_size >= sizes[-1]:
        return _GAMMAS[sizes[-1]] * block_size / sizes[-1]
    return float(np.interp(block_size, sizes, [_GAMMAS[size] for size in sizes]))


@dataclass(frozen=True, slots=True)
class BlockGeometry:
    """How many blocks a sample gets and how long they are.

    Attributes:
        anchors: blocks in each row, constant, so that shapes never change.
        block_size: slots of a block, the anchor's own included.
        gamma: decay of the slot weights; 0 takes the paper's value for the block size.
        per_document: most blocks of one conversation in a packed row; 0: no limit but the row's.
    """

    anchors: int
    block_size: int
    gamma: float = 0.0
    per_document: int = 0

    def __post_init__(self) -> None:
        if self.anchors < 1 or self.block_size < 2:
            raise ValueError(f"{self}: needs at least one anchor and two slots")
        if self.gamma <= 0.0:
            object.__setattr__(self, "gamma", default_gamma(self.block_size))

    @property
    def decay(self) -> np.ndarray:
        """float32 `[block-1]`: exp(-(k-1)/gamma) for k = 1..block-1."""
        return np.exp(-np.arange(self.block_size - 1) / self.gamma).astype(np.float32)


def anchor_candidates(loss_mask: np.ndarray, document_ids: np.ndarray | None = None) -> np.ndarray:
    """Positions a block may start at, ascending int64: `a` and `a + 1` supervised, and of one document.

    A block may reach over the end of the sample: its last slots then carry no weight. So every sample with
    two supervised tokens side by side has a candidate."""
    fit = loss_mask[:-1] & loss_mask[1:]
    if document_ids is not None:
        fit = fit & (document_ids[:-1] == document_ids[1:])
    return np.flatnonzero(fit)


def sample_anchors(
    loss_mask: np.ndarray,
    anchors: int,
    rng: np.random.Generator,
    document_ids: np.ndarray | None = None,
    per_document: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw a row's anchors uniformly without replacement.

    Args:
        loss_mask: bool `[length]`, true on supervised tokens.
        anchors: how many to draw.
        rng: the only source of chance.
        document_ids: int `[length]`, equal inside a document; None for a row of one.
        per_document: draw at most so many of each document first; 0: of the row alone.

    Returns:
        int64 `[anchors]`, ascending, and bool `[anchors]`. Where there are fewer candidates, the rest are 0
        and false and stand last.
    """
    chosen = np.zeros(anchors, np.int64)
    keep = np.zeros(anchors, bool)
    candidates = anchor_candidates(loss_mask, document_ids)
    if document_ids is not None and per_document:
        owners = document_ids[candidates]
        parts = np.split(candidates, np.flatnonzero(np.diff(owners)) + 1)
        candidates = np.concatenate(
            [
                np.sort(rng.choice(part, per_document, replace=False)) if len(part) > per_document else part
                for part in parts
            ]
        )
    if len(candidates) > anchors:
        candidates = np.sort(rng.choice(candidates, anchors, replace=False))
    chosen[: len(candidates)] = candidates
    keep[: len(candidates)] = True
    return chosen, keep


@dataclass(frozen=True, slots=True)
class AnchorCounts:
    """How many blocks a data set gives.

    Attributes:
        places: where a block may start.
        blocks: how many of them an epoch draws.
        fullest_row: the blocks of the row that has most of them.
    """

    places: int
    blocks: int
    fullest_row: int

    @property
    def share(self) -> float:
        """Share of the places that an epoch draws, 0 to 1."""
        return self.blocks / self.places if self.places else 0.0


def count_anchors(
    loss_mask: np.ndarray, offsets: np.ndarray, anchors: int, document_ids: np.ndarray | None = None
) -> AnchorCounts:
    """Count the blocks of a flat data set when every conversation gives at most `anchors`.

    Args:
        loss_mask: bool `[tokens]`, all rows one after the other.
        offsets: int64 `[rows + 1]`, where each row begins.
        anchors: most blocks of a conversation.
        document_ids: int `[tokens]` of packed rows; None: each row is one conversation.
    """
    fit = loss_mask[:-1] & loss_mask[1:]
    begins = np.zeros(len(loss_mask), bool)
    begins[offsets[:-1]] = True
    if document_ids is not None:
        begins[1:] |= document_ids[1:] != document_ids[:-1]
    fit &= ~begins[1:]
    starts = np.flatnonzero(begins)
    places = np.add.reduceat(np.append(fit, False), starts, dtype=np.int64)
    blocks = np.minimum(places, anchors)
    rows = np.add.reduceat(blocks, np.searchsorted(starts, offsets[:-1]))
    return AnchorCounts(int(places.sum()), int(blocks.sum()), int(rows.max()))


def slot_labels(
    input_ids: np.ndarray,
    loss_mask: np.ndarray,
    anchors: np.ndarray,
    keep: np.ndarray,
    geometry: BlockGeometry,
    document_ids: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Labels and weights of the slots 1..block-1, of one row or of a batch of padded rows.

    Args:
        input_ids: int `[..., length]`.
        loss_mask: bool `[..., length]`, false on padding.
        anchors, keep: `[..., anchors]` as `sample_anchors` gives them.
        document_ids: int `[..., length]` or None.

    Returns:
        int64 `[..., anchors, block-1]`, the token at `a + k`, and float32 of that shape, exp(-(k-1)/gamma).
        Both are 0 where the block is dropped or where `a + k` is past the end, unsupervised or in another
        document.
    """
    length = input_ids.shape[-1]
    reach = anchors[..., None] + np.arange(1, geometry.block_size)
    inside = np.minimum(reach, length - 1).reshape(*anchors.shape[:-1], -1)

    def at_slots(row: np.ndarray) -> np.ndarray:
        return np.take_along_axis(row, inside, axis=-1).reshape(reach.shape)

    counted = (reach < length) & keep[..., None] & at_slots(loss_mask)
    if document_ids is not None:
        counted &= at_slots(document_ids) == np.take_along_axis(document_ids, anchors, axis=-1)[..., None]
    labels = np.where(counted, at_slots(input_ids), 0).astype(np.int64)
    return labels, np.where(counted, geometry.decay, np.float32(0.0))


def document_starts(anchors: np.ndarray, document_ids: np.ndarray | None) -> np.ndarray:
    """First position of each anchor's document, int64 of the anchors' shape; zeros without document ids.

    `document_ids` `[length]` must be ascending, as packing makes them.
    """
    if document_ids is None:
        return np.zeros_like(anchors)
    return np.searchsorted(document_ids, document_ids[anchors]).astype(np.int64)


def visible_pairs(
    anchors: np.ndarray,
    keep: np.ndarray,
    document_start: np.ndarray,
    block_size: int,
    window: int | None = None,
) -> int:
    """Pairs of a slot and a column that it sees, over all kept blocks: context of its document before the
    anchor, and its own block (`models.blocks.dense_attention_mask` without the dropped blocks).

    Args:
        anchors, keep, document_start: `[batch, anchors]`.
        window: width of the sliding window, tokens; None for a full-attention layer.
    """
    reach = (anchors - document_start)[keep]
    if window is None:
        return int(reach.sum()) * block_size + len(reach) * block_size**2
    slot = np.arange(block_size)
    far = np.minimum(reach[:, None], np.maximum(0, window - 1 - slot))
    return int(far.sum()) + len(reach) * int(np.minimum(slot + 1, window).sum())


Limits = tuple[tuple[int, int], ...]
"""`(all_visible, any_visible)` for each chunk of neighbouring blocks; see `context_limits`."""


def context_limits(
    anchors: np.ndarray,
    keep: np.ndarray,
    document_start: np.ndarray,
    context: int,
    chunk: int = 8,
    grain: int = 32,
) -> Limits:
    """How much context the blocks see that stand together: `(all_visible, any_visible)` for each chunk of the
    rows' ascending anchors.

    Every kept block of the chunk, in all rows of the batch, sees every column below `all_visible`, and none
    sees one from `any_visible` on. Host integers, in grains, so that few shapes arise.

    Args:
        anchors, keep, document_start: `[batch, anchors]`.
        context: columns of the padded batch.
        chunk: blocks in a chunk.
    """
    limits = []
    for first in range(0, anchors.shape[1], chunk):
        part = slice(first, first + chunk)
        kept, places = keep[:, part], anchors[:, part]
        # A row without context is masked whole, so dropped blocks and later documents leave nothing sure.
        plain = kept.all() and not document_start[:, part].any()
        all_visible = int(places.min()) // grain * grain if plain else 0
        far = int(places[kept].max()) if kept.any() else 0
        limits.append((all_visible, min(context, max(grain, -(-far // grain) * grain))))
    return tuple(limits)
