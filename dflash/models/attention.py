"""What slots see, computed three ways: `dense` (the reference), `split` (context and own block apart) and
`flex` (CUDA).

All take queries, keys and values of the block rows and keys and values of the context, and give the attended
values of the block rows. The mask is a function of the anchors alone, so it is prepared once a step for all
layers (`prepare`). Nothing here reads a device value on the host, and shapes depend on the batch's shape
only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from dflash.models.blocks import dense_attention_mask
from dflash.models.workspace import Workspace
from steptime import regions


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
        make_mask, self.attend = flex_functions(window, layout.anchors.device)
        self.block_mask = make_mask(layout, window)

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
        return self.attend(query, keys, values, self.block_mask)


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


def _make_block_mask(layout: BlockLayout, window: int | None) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    batch, count = layout.anchors.shape
    rows = count * layout.block_size
    return create_block_mask(
        flex_mask(layout, window),
        B=batch,
        H=None,
        Q_LEN=rows,
        KV_LEN=layout.context + rows,
        device=layout.anchors.device,
    )


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_mask: Any) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    plain: Any = flex_attention
    grouped = query.shape[1] != key.shape[1]
    return plain(query, key, value, block_mask=block_mask, enable_gqa=grouped)  # type: ignore[no-any-return]


FlexFunctions = tuple[Callable[[BlockLayout, int | None], Any], Callable[..., torch.Tensor]]
"""What makes the block mask, and what attends under it."""


def flex_functions(window: int | None, device: torch.device) -> FlexFunctions:
    """Compiled on CUDA, plain elsewhere."""
    return compiled_flex(window, device) if device.type == "cuda" else (_make_block_mask, _attend)


@functools.cache
def compiled_flex(
    window: int | None, device: torch.device, backend: str | Callable[..., Any] = "inductor"
) -> FlexFunctions:
    """Compiled once for each window and device, since a form is kept for each shape (a bucket has one).

    The trainer runs it before its threads start: two traces at once are a known race."""
    name = f"{'full' if window is None else f'window_{window}'}_{device.type}_{device.index or 0}"
    return (
        regions.compiled(_make_block_mask, f"flex_mask_{name}", dynamic=False, backend=backend),
        regions.compiled(_attend, f"flex_attention_{name}", dynamic=False, backend=backend),
    )


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


class AutogradAttention:
    """Any attention of `attention.py`, differentiated by autograd inside the written-out pass."""

    scales_queries = True

    def __init__(self, attention: Attention, layout: BlockLayout, workspace: Workspace) -> None:
        self.attention, self.workspace = attention, workspace
        self.shape = (layout.anchors.shape[0], layout.context)

    def context_buffer(self, name: str, kv_heads: int, d: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for the context's keys or values `[batch, kv_heads, context, d]`."""
        batch, context = self.shape
        return self.workspace.take(name, (batch, kv_heads, context, d), dtype)

    def forward(self, layer: int, *states: torch.Tensor) -> tuple[torch.Tensor, Any]:
        query, key, value, context_key, context_value = (state.detach().requires_grad_() for state in states)
        batch, kv_heads, count, rows, d = query.shape
        size = key.shape[3]
        groups = rows // size
        with torch.enable_grad():
            heads = (
                query.view(batch, kv_heads, count, groups, size, d)
                .transpose(2, 3)
                .reshape(batch, -1, count * size, d)
            )
            out = self.attention(heads, key.flatten(2, 3), value.flatten(2, 3), context_key, context_value)
            out = out.reshape(batch, kv_heads, groups, count, size, d).transpose(2, 3).reshape(query.shape)
        return out.detach(), (out, (query, key, value, context_key, context_value))

    def backward(self, saved: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, leaves = saved
        gradients = torch.autograd.grad(out, leaves, dout)
        return tuple(gradient.contiguous() for gradient in gradients)
