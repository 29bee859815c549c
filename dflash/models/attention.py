"""What slots see, computed three ways: `dense` (the reference), `split` (context and own block apart) and
`flex` (CUDA).

All take queries, keys and values of the block rows and keys and values of the context, and give the attended
values of the block rows. The mask is a function of the anchors alone, so it is prepared once a step for all
layers (`prepare`). Nothing here reads a device value on the host, and shapes depend on the batch's shape
only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from dflash.models.blocks import dense_attention_mask


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where the blocks of a batch lie: anchors, keep, document_start `[batch, anchors]`, and the shapes."""

    anchors: torch.Tensor
    keep: torch.Tensor
    document_start: torch.Tensor
    context: int
    block_size: int


class Attention(Protocol):
    """Attention of one kind of layer for one batch.

    query `[batch, heads, anchors*block, d]`, key and value `[batch, kv_heads, anchors*block, d]`, context_key
    and context_value `[batch, kv_heads, context, d]` -> `[batch, heads, anchors*block, d]`."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context_key: torch.Tensor,
        context_value: torch.Tensor,
    ) -> torch.Tensor: ...


class DenseAttention:
    """SDPA over all context and all block columns under a boolean mask: slow, and plainly right."""

    def __init__(self, layout: BlockLayout, window: int | None, dtype: torch.dtype) -> None:
        self.mask = dense_attention_mask(
            layout.anchors, layout.keep, layout.document_start, layout.context, layout.block_size, window
        )[:, None]

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context_key: torch.Tensor,
        context_value: torch.Tensor,
    ) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1]
        keys = torch.cat([context_key, key], dim=2).repeat_interleave(groups, dim=1)
        values = torch.cat([context_value, value], dim=2).repeat_interleave(groups, dim=1)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=self.mask)


class SplitAttention:
    """Logits over the context and over the own block only, under one softmax: never the square of all
    slots."""

    def __init__(self, layout: BlockLayout, window: int | None, dtype: torch.dtype) -> None:
        self.size = layout.block_size
        device = layout.anchors.device
        column = torch.arange(layout.context, device=device)
        anchor = layout.anchors[..., None]
        sees = (column < anchor) & (column >= layout.document_start[..., None]) & layout.keep[..., None]
        sees = sees[:, :, None]
        slot = torch.arange(self.size, device=device)
        sees_block = torch.ones(self.size, self.size, dtype=torch.bool, device=device)
        if window is not None:
            sees = sees & (column > anchor[:, :, None] + slot[:, None] - window)
            distance = slot[:, None] - slot[None, :]
            sees_block = (distance >= 0) & (distance < window)
        # [batch, 1, 1, anchors, block or 1, context]
        self.context_bias = torch.zeros(sees.shape, dtype=dtype, device=device).masked_fill_(
            ~sees, -torch.inf
        )[:, None, None]
        self.block_bias = torch.zeros(sees_block.shape, dtype=dtype, device=device).masked_fill_(
            ~sees_block, -torch.inf
        )
        self.causal = window is not None

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context_key: torch.Tensor,
        context_value: torch.Tensor,
    ) -> torch.Tensor:
        batch, heads, rows, d = query.shape
        kv_heads, context = context_key.shape[1], context_key.shape[2]
        groups, count, size = heads // kv_heads, rows // self.size, self.size
        query = query * d**-0.5
        by_kv = query.reshape(batch, kv_heads, groups * rows, d)
        far = (by_kv @ context_key.transpose(-1, -2)).view(
            batch, kv_heads, groups, count, size, context
        ) + self.context_bias
        by_block = query.view(batch, kv_heads, groups, count, size, d)
        near = by_block @ key.view(batch, kv_heads, 1, count, size, d).transpose(-1, -2)
        if self.causal:
            near = near + self.block_bias
        weights = torch.cat([far, near], dim=-1).softmax(dim=-1)
        far, near = weights.split([context, size], dim=-1)
        out = near @ value.view(batch, kv_heads, 1, count, size, d)
        out = out + (far.reshape(batch, kv_heads, groups * rows, context) @ context_value).view_as(out)
        return out.reshape(batch, heads, rows, d)


class FlexAttention:
    """flex_attention with a block mask made on the device: the kernel skips what no slot sees. Forward only
    on the CPU."""

    def __init__(self, layout: BlockLayout, window: int | None, dtype: torch.dtype) -> None:
        from torch.nn.attention.flex_attention import create_block_mask

        batch, count = layout.anchors.shape
        rows = count * layout.block_size
        device = layout.anchors.device
        plain: Callable[..., Any] = create_block_mask
        make = _compiled(plain) if device.type == "cuda" else plain
        self.block_mask = make(
            flex_mask(layout, window),
            B=batch,
            H=None,
            Q_LEN=rows,
            KV_LEN=layout.context + rows,
            device=device,
        )

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context_key: torch.Tensor,
        context_value: torch.Tensor,
    ) -> torch.Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        plain: Callable[..., Any] = flex_attention
        run = _compiled(plain) if query.is_cuda else plain
        keys = torch.cat([context_key, key], dim=2)
        values = torch.cat([context_value, value], dim=2)
        return run(query, keys, values, block_mask=self.block_mask, enable_gqa=query.shape[1] != key.shape[1])


def flex_mask(layout: BlockLayout, window: int | None) -> Callable[..., torch.Tensor]:
    """The mask as flex attention's function of (batch, head, row, column)."""
    anchors, keep, start = layout.anchors, layout.keep, layout.document_start
    context, size = layout.context, layout.block_size

    def sees(b: torch.Tensor, h: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        block, slot = row // size, row % size
        anchor = anchors[b, block]
        far = (column < context) & (column < anchor) & (column >= start[b, block]) & keep[b, block]
        other = column - context
        near = (column >= context) & (other // size == block)
        if window is not None:
            far = far & (column > anchor + slot - window)
            distance = slot - other % size
            near = near & (distance >= 0) & (distance < window)
        return far | near

    return sees


_COMPILED: dict[Any, Callable[..., Any]] = {}


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled once for a process. The trainer runs it before its threads start: two traces at once are a
    known race."""
    if function not in _COMPILED:
        _COMPILED[function] = torch.compile(function, dynamic=False)
    return _COMPILED[function]


KINDS: dict[str, Callable[[BlockLayout, int | None, torch.dtype], Attention]] = {
    "dense": DenseAttention,
    "split": SplitAttention,
    "flex": FlexAttention,
}


def prepare(kind: str, layout: BlockLayout, window: int | None, dtype: torch.dtype) -> Attention:
    """The attention of layers with this window, for this batch. `auto` is flex on CUDA, split elsewhere."""
    if kind == "auto":
        kind = "flex" if layout.anchors.is_cuda else "split"
    return KINDS[kind](layout, window, dtype)
