"""Split attention with its backward written out: logits over the context and over the own block, under one
softmax.

The anchors ascend, so blocks that stand together see about the same stretch of context. The host knows how
far that is (`anchors.context_limits`): the rows of a chunk of blocks meet only the columns that some block of
the batch's chunk can see, and are masked only where some cannot. Two passes over half the columns, instead of
one over the square of all slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash.models.attention import BlockLayout
from dflash.models.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Chunk:
    """Blocks `first` to `last` of every row: they meet the context columns below `any_visible`, all of them
    those below `all_visible`."""

    first: int
    last: int
    all_visible: int
    any_visible: int


@dataclass(slots=True)
class Saved:
    """What the backward of one layer needs. Rows of a pair (batch row, key head) stand together: `[pairs,
    rows, d]`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    context_key: torch.Tensor
    context_value: torch.Tensor
    weights: list[torch.Tensor]
    near: torch.Tensor


class SplitKernel:
    """Attention of one kind of layer for one batch, forward and backward, over a workspace's buffers.

    Queries come already scaled by 1/sqrt(d).
    """

    scales_queries = False

    def __init__(
        self,
        layout: BlockLayout,
        limits: tuple[tuple[int, int], ...] | None,
        window: int | None,
        groups: int,
        dtype: torch.dtype,
        workspace: Workspace,
    ) -> None:
        self.batch, self.count = layout.anchors.shape
        self.size, self.groups, self.context = layout.block_size, groups, layout.context
        self.workspace = workspace
        cuts = window is not None and window < layout.context + layout.block_size
        self.chunks = _chunks(self.count, layout.context, limits, cuts)
        self.bias, self.near_bias = _biases(layout, window if cuts else None, window is not None, dtype)

    def context_buffer(self, name: str, kv_heads: int, d: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for the context's keys or values `[batch, kv_heads, block + context, d]`: fill it from `block`
        on.

        The empty columns in front stand where a row's own block has its logits, so that one product over
        whole rows serves both; what it gives there is not used."""
        buffer = self.workspace.take(name, (self.batch, kv_heads, self.size + self.context, d), dtype)
        buffer[:, :, : self.size].zero_()
        return buffer

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context_key: torch.Tensor,
        context_value: torch.Tensor,
    ) -> tuple[torch.Tensor, Saved]:
        """Attended values, and what backward needs. Everything contiguous.

        Args:
            query: `[batch, kv_heads, anchors, groups*block, d]`; key, value: `[batch, kv_heads, anchors,
                block, d]`.
            context_key, context_value: as `context_buffer` gives them.
        """
        take, dtype, d = self.workspace.take, query.dtype, query.shape[-1]
        pairs, rows = self.batch * key.shape[1], self.groups * self.size
        by_block, key, value = (
            query.view(-1, rows, d),
            key.view(-1, self.size, d),
            value.view(-1, self.size, d),
        )
        query, far_key, far_value = (
            states.view(pairs, -1, d) for states in (query, context_key, context_value)
        )
        near = take("near", (pairs * self.count, rows, self.size), dtype)
        torch.bmm(by_block, key.transpose(1, 2), out=near)
        if self.near_bias is not None:
            near.view(-1, self.groups, self.size, self.size).add_(self.near_bias)
        near_weights = take(f"near_weights{layer}", near.shape, dtype)
        weights = []
        for index, chunk in enumerate(self.chunks):
            logits = self._take("logits", pairs, chunk, dtype)
            torch.bmm(query[:, self._rows(chunk)], far_key[:, : logits.shape[2]].transpose(1, 2), out=logits)
            self._mask(logits, chunk)
            self._own(logits).copy_(self._blocks(near, chunk))
            part = torch.softmax(
                logits, dim=-1, out=self._take(f"weights{layer}.{index}", pairs, chunk, dtype)
            )
            self._blocks(near_weights, chunk).copy_(self._own(part))
            weights.append(part)
            del logits  # or the next chunk would find its buffer in use
        attended = take("attended", by_block.shape, dtype)
        torch.bmm(near_weights, value, out=attended)
        out = attended.view(pairs, -1, d)
        for chunk, part in zip(self.chunks, weights, strict=True):
            out[:, self._rows(chunk)].baddbmm_(part, far_value[:, : part.shape[2]])
        return out, Saved(query, key, value, far_key, far_value, weights, near_weights)

    def backward(self, saved: Saved, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of query, key, value, context_key and context_value, from `dout` laid out like `query`.

        Those of query, key and value are laid out like them; those of the context are `[batch, kv_heads,
        context, d]`."""
        take, dtype, d = self.workspace.take, dout.dtype, dout.shape[-1]
        pairs, rows = saved.query.shape[0], self.groups * self.size
        by_block, dout = dout.view(-1, rows, d), dout.view(pairs, -1, d)
        near = take("near", saved.near.shape, dtype)
        torch.bmm(by_block, saved.value.transpose(1, 2), out=near)
        dvalue, dkey = take("dvalue", saved.value.shape, dtype), take("dkey", saved.key.shape, dtype)
        torch.bmm(saved.near.transpose(1, 2), by_block, out=dvalue)
        dquery = take("dquery", saved.query.shape, dtype)
        far = saved.context_key.shape
        dfar_key, dfar_value = (take(name, far, dtype).zero_() for name in ("dfar_key", "dfar_value"))
        for chunk, weights in zip(self.chunks, saved.weights, strict=True):
            part, columns = self._rows(chunk), weights.shape[2]
            dweights = self._take("logits", pairs, chunk, dtype)
            torch.bmm(dout[:, part], saved.context_value[:, :columns].transpose(1, 2), out=dweights)
            dfar_value[:, :columns].baddbmm_(weights.transpose(1, 2), dout[:, part])
            self._own(dweights).copy_(self._blocks(near, chunk))
            dlogits = self._take("dlogits", pairs, chunk, dtype)
            torch.ops.aten._softmax_backward_data.out(dweights, weights, -1, dtype, grad_input=dlogits)
            self._blocks(near, chunk).copy_(self._own(dlogits))
            torch.bmm(dlogits, saved.context_key[:, :columns], out=dquery[:, part])
            dfar_key[:, :columns].baddbmm_(dlogits.transpose(1, 2), saved.query[:, part])
            del dweights, dlogits
        dquery.view(-1, rows, d).baddbmm_(near, saved.key)
        torch.bmm(near.transpose(1, 2), saved.query.view(-1, rows, d), out=dkey)
        by_row = (gradient.view(self.batch, -1, *far[1:]) for gradient in (dfar_key, dfar_value))
        return dquery, dkey, dvalue, *(gradient[:, :, self.size :] for gradient in by_row)

    def _take(self, name: str, pairs: int, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        rows = (chunk.last - chunk.first) * self.groups * self.size
        return self.workspace.take(name, (pairs, rows, self.size + chunk.any_visible), dtype)

    def _rows(self, chunk: Chunk) -> slice:
        per_block = self.groups * self.size
        return slice(chunk.first * per_block, chunk.last * per_block)

    def _own(self, logits: torch.Tensor) -> torch.Tensor:
        """The columns of each row's own block: `[pairs, blocks of the chunk, groups*block, block]`."""
        return logits.view(logits.shape[0], -1, self.groups * self.size, logits.shape[2])[..., : self.size]

    def _blocks(self, near: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """The part of a chunk in what is computed for all own blocks at once, shaped like `_own`."""
        return near.view(-1, self.count, self.groups * self.size, self.size)[:, chunk.first : chunk.last]

    def _mask(self, logits: torch.Tensor, chunk: Chunk) -> None:
        if chunk.all_visible == chunk.any_visible:
            return
        count = chunk.last - chunk.first
        rows = logits.view(self.batch, -1, count, self.groups, self.size, logits.shape[2])
        hidden = self.bias[:, None, chunk.first : chunk.last, None, :, chunk.all_visible : chunk.any_visible]
        rows[..., self.size + chunk.all_visible :].add_(hidden)


def _chunks(
    count: int, context: int, limits: tuple[tuple[int, int], ...] | None, cuts: bool
) -> tuple[Chunk, ...]:
    if limits is None:
        limits = ((0, context),)
    step = -(-count // len(limits))
    return tuple(
        Chunk(i * step, min(count, (i + 1) * step), 0 if cuts else all_visible, any_visible)
        for i, (all_visible, any_visible) in enumerate(limits)
    )


def _biases(
    layout: BlockLayout, window: int | None, causal: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """0 where seen and -inf where not: `[batch, anchors, block or 1, context]`, and `[block, block]` for a
    causal block."""
    device = layout.anchors.device
    column = torch.arange(layout.context, device=device)
    anchor = layout.anchors[..., None]
    hidden = (column >= anchor) | (column < layout.document_start[..., None]) | ~layout.keep[..., None]
    hidden = hidden[:, :, None]
    slot = torch.arange(layout.block_size, device=device)
    distance = slot[:, None] - slot
    if window is not None:
        hidden = hidden | (column <= anchor[:, :, None] + slot[:, None] - window)
    bias = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
    if not causal:
        return bias, None
    unseen = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    return bias, torch.zeros(unseen.shape, dtype=dtype, device=device).masked_fill_(unseen, -torch.inf)
