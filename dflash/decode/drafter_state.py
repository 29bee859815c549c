"""The drafter's memory of several rows: keys and values of the context features, layer by layer, and drafting
from them.

The block's own keys and values are made anew in every cycle and never kept: its tokens were guesses. The
bonus token of a cycle has no feature yet, so the context ends right before the anchor, as in training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from dflash.decode.rows import kept_columns, padding_mask, take_columns
from dflash.models.drafter import Drafter


class _ContextAndBlock:
    """SDPA over all context columns and the block, under one mask (None: everything is seen)."""

    def __init__(self, mask: torch.Tensor | None) -> None:
        self.mask = mask

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context_key: torch.Tensor,
        context_value: torch.Tensor,
    ) -> torch.Tensor:
        keys = torch.cat([context_key, key], dim=2)
        values = torch.cat([context_value, value], dim=2)
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=self.mask, enable_gqa=grouped)


class DrafterState:
    """What the drafter keeps of the committed tokens, and its guesses for the next ones.

    Args:
        drafter: in evaluation, on the device and in the type of `embedding` and `head`.
        embedding, head: `[V, H]`, the target's.
        rows: how many rows.

    Attributes:
        lengths: context columns of each row: its committed tokens but the anchor.
    """

    def __init__(self, drafter: Drafter, embedding: torch.Tensor, head: torch.Tensor, rows: int) -> None:
        self.drafter, self.embedding, self.head = drafter, embedding, head
        self.lengths = [0] * rows
        self._columns = 0
        shape = drafter.shape
        empty = embedding.new_empty(rows, shape.kv_heads, 0, shape.head_dim, dtype=drafter.fc.weight.dtype)
        self._memory = [(empty, empty) for _ in drafter.layers]
        self._device = embedding.device

    def prefill(self, features: torch.Tensor, lengths: Sequence[int]) -> None:
        """Take the features of the prompts, right-aligned `[rows, longest, K*H]`."""
        columns = features.shape[1]
        first = torch.tensor([length - columns for length in lengths], device=self._device)
        positions = (torch.arange(columns, device=self._device) + first[:, None]).clamp_(min=0)
        self._memory = self._keys_values(features, positions)
        self.lengths, self._columns = list(lengths), columns

    def append(self, features: torch.Tensor, kept: Sequence[int]) -> None:
        """Take the features of a pass, of which the first `kept[r]` in row r were committed: `[rows, n,
        K*H]`."""
        device = self._device
        most = max(kept)
        starts = torch.tensor(self.lengths, device=device)
        fresh = self._keys_values(features[:, :most], starts[:, None] + torch.arange(most, device=device))
        lengths = [length + count for length, count in zip(self.lengths, kept, strict=True)]
        columns = max(lengths)
        moved = kept_columns(self._columns, kept, columns, device)
        self._memory = [
            (
                take_columns(torch.cat([key, new_key], dim=2), moved, columns, 2),
                take_columns(torch.cat([value, new_value], dim=2), moved, columns, 2),
            )
            for (key, value), (new_key, new_value) in zip(self._memory, fresh, strict=True)
        ]
        self.lengths, self._columns = lengths, columns

    def draft(self, anchors: torch.Tensor, block_size: int) -> torch.Tensor:
        """Greedy drafts for the slots 1..block_size-1: int64 `[rows, block_size-1]`.

        Args:
            anchors: int64 `[rows]`, the token after the context of each row (the bonus token).
            block_size: slots, at most the trained block's.
        """
        hidden = self.hidden(anchors, block_size)
        return F.linear(hidden.to(self.head.dtype), self.head).argmax(dim=-1)

    def hidden(self, anchors: torch.Tensor, block_size: int) -> torch.Tensor:
        """Normed hidden states of the slots 1..block_size-1: `[rows, block_size-1, H]`."""
        drafter, shape = self.drafter, self.drafter.shape
        starts = torch.tensor(self.lengths, device=self._device)
        positions = starts[:, None] + torch.arange(block_size, device=self._device)
        rotary = self._rotary(positions)
        first = F.embedding(anchors[:, None], self.embedding)
        masks = self.embedding[shape.mask_token_id].expand(len(self.lengths), block_size - 1, -1)
        x = torch.cat([first, masks], dim=1).to(drafter.fc.weight.dtype)
        attentions = {
            shape.window(i): _ContextAndBlock(self._mask(block_size, shape.window(i)))
            for i in range(shape.layers)
        }
        for index, layer in enumerate(drafter.layers):
            x = layer(x, self._memory[index], rotary, attentions[shape.window(index)])
        return drafter.norm(x[:, 1:])

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        index = torch.tensor(rows, device=self._device)
        self.lengths = [self.lengths[row] for row in rows]
        self._columns = max(self.lengths)
        self._memory = [
            (
                key[index][:, :, key.shape[2] - self._columns :],
                value[index][:, :, value.shape[2] - self._columns :],
            )
            for key, value in self._memory
        ]

    def _keys_values(
        self, features: torch.Tensor, positions: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        feature = self.drafter.context_feature(features.to(self.drafter.fc.weight.dtype))
        rotary = self._rotary(positions)
        return [layer.self_attn.keys_values(feature, rotary) for layer in self.drafter.layers]

    def _rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin `[rows, 1, n, head_dim]` at int64 positions `[rows, n]`."""
        rotary = self.drafter.rotary
        rotary.grow(max(self.lengths) + positions.shape[1] + 1, self._device, self.drafter.fc.weight.dtype)
        return rotary.cos[positions][:, None], rotary.sin[positions][:, None]

    def _mask(self, block_size: int, window: int | None) -> torch.Tensor | None:
        """bool `[rows, 1, block_size, columns + block_size]`, or None when every slot sees everything."""
        rows, device = len(self.lengths), self._device
        padding = padding_mask(self.lengths, self._columns, device)
        if padding is None and window is None:
            return None
        real = (
            torch.ones(rows, self._columns, dtype=torch.bool, device=device) if padding is None else padding
        )
        near = torch.ones(rows, block_size, block_size, dtype=torch.bool, device=device)
        far = real[:, None].expand(-1, block_size, -1)
        if window is not None:
            slot = torch.arange(block_size, device=device)
            # Column c of a row is `columns - c` before the anchor, in every row alike.
            before = self._columns - torch.arange(self._columns, device=device)
            far = far & (before + slot[:, None] < window)
            distance = slot[:, None] - slot
            near = near & (distance >= 0) & (distance < window)
        return torch.cat([far, near], dim=-1)[:, None]
