"""Split attention with its backward written out: logits over the context and over the own block, under one softmax.

The anchors ascend, so blocks that stand together see about the same stretch of context. The host knows how far that is
(`blocks.context_limits`): the rows of a chunk of blocks meet only the columns that some block of the batch's chunk can see,
and are masked only where some cannot. Two passes over half the columns, instead of one over the square of all slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash.models.attention import Places
from dflash.models.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Chunk:
    """Blocks `first` to `last` of every row: they meet the context columns below `reach`, all of them those below `sure`."""

    first: int
    last: int
    sure: int
    reach: int


@dataclass(slots=True)
class Saved:
    """What the backward of one layer needs. Layout of rows: `[batch*kv_heads, anchors*groups*block, d]`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    context_key: torch.Tensor
    context_value: torch.Tensor
    weights: list[torch.Tensor]
    near: torch.Tensor


class SplitKernel:
    """Attention of one kind of layer for one batch, forward and backward, over a workspace's buffers."""

    def __init__(
        self,
        places: Places,
        limits: tuple[tuple[int, int], ...] | None,
        window: int | None,
        groups: int,
        head_dim: int,
        dtype: torch.dtype,
        workspace: Workspace,
    ) -> None:
        self.batch, self.count = places.anchors.shape
        self.size, self.groups, self.head_dim = places.block_size, groups, head_dim
        self.scale = head_dim**-0.5
        self.workspace = workspace
        cuts = window is not None and window < places.context + places.block_size
        self.chunks = _chunks(self.count, places.context, limits, cuts)
        self.bias, self.near_bias = _biases(places, window if cuts else None, window is not None, dtype)

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context_key: torch.Tensor,
        context_value: torch.Tensor,
    ) -> tuple[torch.Tensor, Saved]:
        """Attended values, and what backward needs.

        Args:
            query: `[batch, kv_heads, anchors, groups*block, d]`; key, value: `[batch, kv_heads, anchors, block, d]`; contiguous.
            context_key, context_value: `[batch, kv_heads, context, d]`, any strides but the last.
        """
        take, d = self.workspace.take, self.head_dim
        kv_heads = key.shape[1]
        pairs, rows = self.batch * kv_heads, self.groups * self.size
        dtype = query.dtype
        out = take("attended", query.shape, dtype)
        near = take("near", (pairs * self.count, rows, self.size), dtype)
        blocks = query.view(-1, rows, d)
        torch.baddbmm(near, blocks, key.view(-1, self.size, d).transpose(1, 2), beta=0, alpha=self.scale, out=near)
        if self.near_bias is not None:
            near.view(-1, self.groups, self.size, self.size).add_(self.near_bias)
        near = near.view(pairs, self.count, rows, self.size)
        flat_query = query.view(pairs, self.count * rows, d)
        weights = []
        for index, chunk in enumerate(self.chunks):
            logits = self._take("logits", pairs, chunk, dtype)
            for pair in range(pairs):
                far = logits[pair, :, : chunk.reach]
                keys = context_key[pair // kv_heads, pair % kv_heads, : chunk.reach]
                torch.addmm(far, self._rows(flat_query, pair, chunk), keys.t(), beta=0, alpha=self.scale, out=far)
            self._mask(logits, chunk, kv_heads)
            self._near_part(logits, chunk).copy_(near[:, chunk.first : chunk.last])
            probabilities = self._take(f"weights{layer}.{index}", pairs, chunk, dtype)
            weights.append(torch.softmax(logits, dim=-1, out=probabilities))
        near_weights = take(f"near_weights{layer}", near.shape, dtype)
        for chunk, part in zip(self.chunks, weights, strict=True):
            near_weights[:, chunk.first : chunk.last].copy_(self._near_part(part, chunk))
        torch.bmm(near_weights.view(-1, rows, self.size), value.view(-1, self.size, d), out=out.view(-1, rows, d))
        flat_out = out.view(pairs, self.count * rows, d)
        for chunk, part in zip(self.chunks, weights, strict=True):
            for pair in range(pairs):
                values = context_value[pair // kv_heads, pair % kv_heads, : chunk.reach]
                self._rows(flat_out, pair, chunk).addmm_(part[pair, :, : chunk.reach], values)
        return out, Saved(query, key, value, context_key, context_value, weights, near_weights)

    def backward(
        self,
        saved: Saved,
        dout: torch.Tensor,
        dcontext_key: torch.Tensor,
        dcontext_value: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of query, key and value; those of the context are added into the two given buffers.

        `dout` is laid out like `query`; `dcontext_key` and `dcontext_value` like the context's keys and values.
        """
        take, d = self.workspace.take, self.head_dim
        kv_heads = saved.key.shape[1]
        pairs, rows = self.batch * kv_heads, self.groups * self.size
        dtype = dout.dtype
        blocks = dout.view(-1, rows, d)
        near = take("near", (pairs * self.count, rows, self.size), dtype)
        torch.bmm(blocks, saved.value.view(-1, self.size, d).transpose(1, 2), out=near)
        near = near.view(pairs, self.count, rows, self.size)
        dquery = take("dquery", saved.query.shape, dtype)
        dkey, dvalue = take("dkey", saved.key.shape, dtype), take("dvalue", saved.value.shape, dtype)
        near_weights = saved.near.view(-1, rows, self.size)
        torch.bmm(near_weights.transpose(1, 2), blocks, out=dvalue.view(-1, self.size, d))
        flat_dout = dout.view(pairs, self.count * rows, d)
        flat_query = saved.query.view(pairs, self.count * rows, d)
        flat_dquery = dquery.view(pairs, self.count * rows, d)
        for chunk, weights in zip(self.chunks, saved.weights, strict=True):
            dweights = self._take("logits", pairs, chunk, dtype)
            for pair in range(pairs):
                row, head = divmod(pair, kv_heads)
                upstream = self._rows(flat_dout, pair, chunk)
                values = saved.context_value[row, head, : chunk.reach]
                torch.mm(upstream, values.t(), out=dweights[pair, :, : chunk.reach])
                dcontext_value[row, head, : chunk.reach].addmm_(weights[pair, :, : chunk.reach].t(), upstream)
            self._near_part(dweights, chunk).copy_(near[:, chunk.first : chunk.last])
            dlogits = self._take("dlogits", pairs, chunk, dtype)
            torch.ops.aten._softmax_backward_data.out(dweights, weights, -1, dtype, grad_input=dlogits)
            near[:, chunk.first : chunk.last].copy_(self._near_part(dlogits, chunk))
            for pair in range(pairs):
                row, head = divmod(pair, kv_heads)
                far = dlogits[pair, :, : chunk.reach]
                target = self._rows(flat_dquery, pair, chunk)
                keys = saved.context_key[row, head, : chunk.reach]
                torch.addmm(target, far, keys, beta=0, alpha=self.scale, out=target)
                dcontext_key[row, head, : chunk.reach].addmm_(far.t(), self._rows(flat_query, pair, chunk), alpha=self.scale)
        dnear = near.view(-1, rows, self.size)
        dquery.view(-1, rows, d).baddbmm_(dnear, saved.key.view(-1, self.size, d), alpha=self.scale)
        keys_grad = dkey.view(-1, self.size, d)
        torch.baddbmm(keys_grad, dnear.transpose(1, 2), saved.query.view(-1, rows, d), beta=0, alpha=self.scale, out=keys_grad)
        return dquery, dkey, dvalue

    def _take(self, name: str, pairs: int, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        rows = (chunk.last - chunk.first) * self.groups * self.size
        return self.workspace.take(name, (pairs, rows, chunk.reach + self.size), dtype)

    def _rows(self, flat: torch.Tensor, pair: int, chunk: Chunk) -> torch.Tensor:
        per_block = self.groups * self.size
        return flat[pair, chunk.first * per_block : chunk.last * per_block]

    def _near_part(self, logits: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        count = chunk.last - chunk.first
        return logits.view(logits.shape[0], count, self.groups * self.size, -1)[..., chunk.reach :]

    def _mask(self, logits: torch.Tensor, chunk: Chunk, kv_heads: int) -> None:
        count = chunk.last - chunk.first
        view = logits.view(self.batch, kv_heads, count, self.groups, self.size, -1)[..., chunk.sure : chunk.reach]
        view.add_(self.bias[:, None, chunk.first : chunk.last, None, :, chunk.sure : chunk.reach])


def _chunks(count: int, context: int, limits: tuple[tuple[int, int], ...] | None, cuts: bool) -> tuple[Chunk, ...]:
    if limits is None:
        limits = ((0, context),)
    step = -(-count // len(limits))
    return tuple(
        Chunk(i * step, min(count, (i + 1) * step), 0 if cuts else sure, reach) for i, (sure, reach) in enumerate(limits)
    )


def _biases(places: Places, window: int | None, causal: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """0 where seen and -inf where not: `[batch, anchors, block or 1, context]`, and `[block, block]` for a causal block."""
    device = places.anchors.device
    column = torch.arange(places.context, device=device)
    anchor = places.anchors[..., None]
    hidden = (column >= anchor) | (column < places.document_start[..., None]) | ~places.keep[..., None]
    hidden = hidden[:, :, None]
    slot = torch.arange(places.block_size, device=device)
    distance = slot[:, None] - slot
    if window is not None:
        hidden = hidden | (column <= anchor[:, :, None] + slot[:, None] - window)
    bias = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
    if not causal:
        return bias, None
    unseen = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    return bias, torch.zeros(unseen.shape, dtype=dtype, device=device).masked_fill_(unseen, -torch.inf)
