"""What the slots of a block see, on the device. Where blocks lie and what they predict:
`dflash.data.anchors`.

The mask at the end is the slow, obvious statement of what a slot sees, which the fast attentions are held
against. Paper sections 3-4; the reference's 1.6 and 1.8. Everything here is a pure function of its arguments.
"""

from __future__ import annotations

import torch


def slot_positions(anchors: torch.Tensor, block_size: int) -> torch.Tensor:
    """Positions of all slots, int64 `[batch, anchors, block]`: `a + k`, never restarted per block."""
    return anchors[..., None] + torch.arange(block_size, device=anchors.device)


def scored_slots(states: torch.Tensor) -> torch.Tensor:
    """`[..., block, H]` -> `[..., block-1, H]`: the slots that predict. Slot 0 holds the anchor's token,
    which is known."""
    return states[..., 1:, :]


def dense_attention_mask(
    anchors: torch.Tensor,
    keep: torch.Tensor,
    document_start: torch.Tensor,
    context: int,
    block_size: int,
    window: int | None = None,
) -> torch.Tensor:
    """What every slot sees, written out: the reference of all other attentions, and the mask of
    `attention="dense"`.

    Slot k of the block at `a` sees the context columns of its document strictly before `a` (the anchor's own
    feature is never there at inference: the bonus token has none) and the slots of its own block. With a
    window W (sliding layers) it sees only columns from `a + k - (W-1)` on, and of its block only slots up to
    its own.

    Args:
        anchors, keep, document_start: `[batch, anchors]`.
        context: context columns.
        window: width of the sliding window, tokens; None for a full-attention layer.

    Returns:
        bool `[batch, anchors*block, context + anchors*block]`. No row is empty: a dropped block sees itself.
    """
    batch, count = anchors.shape
    rows = count * block_size
    slot = torch.arange(rows, device=anchors.device) % block_size
    block = torch.arange(rows, device=anchors.device) // block_size
    column = torch.arange(context, device=anchors.device)

    def per_row(value: torch.Tensor) -> torch.Tensor:
        return value.repeat_interleave(block_size, dim=1, output_size=rows)[:, :, None]

    sees_context = (column < per_row(anchors)) & (column >= per_row(document_start)) & per_row(keep)
    sees_block = (block[:, None] == block[None, :]).expand(batch, rows, rows)
    if window is not None:
        sees_context &= column > per_row(anchors) + slot[:, None] - window
        sees_block = sees_block & (slot[:, None] >= slot[None, :]) & (slot[:, None] - slot[None, :] < window)
    return torch.cat([sees_context, sees_block], dim=2)
