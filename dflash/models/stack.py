"""The drafter's training pass, forward and backward written out over kept buffers.

It computes what `Drafter`'s modules state (tests hold it to them, gradient by gradient) with three
differences in how: gradients of weights are added by the matrix product itself into the flat gradient buffer;
matrices that lie side by side there (q|k|v, gate|up) are multiplied as one; nothing is allocated in a step of
a known shape. Attention is `SplitKernel`, or any other kind through an island of automatic differentiation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dflash.data.anchors import Limits
from dflash.models import elementwise
from dflash.models.attention import AutogradAttention, BlockLayout, prepare
from dflash.models.blocks import scored_slots, slot_positions
from dflash.models.elementwise_compiled import operations
from dflash.models.rows import DistinctRows, EveryRow, Rows
from dflash.models.split import SplitKernel
from dflash.models.weights import LayerWeights, Weight, layer_weights
from dflash.models.workspace import Workspace

if TYPE_CHECKING:
    from dflash.models.drafter import Drafter
    from dflash.models.optimizer import FlatParameters


class Stack:
    """The written-out pass of one drafter over its flat buffers. One forward, then its backward, in turns.

    Attributes:
        after_layer: called in the backward with the number of each layer whose weights' gradients are
            complete, the last layer first; None: nobody wants to know.
    """

    after_layer: Callable[[int], None] | None = None

    def __init__(self, drafter: Drafter, flat: FlatParameters) -> None:
        self.shape = drafter.shape
        self.rotary = drafter.rotary
        self.trigger = drafter.norm.weight
        self.workspace = Workspace(flat.working)
        self.dtype = flat.working.dtype
        self.passes = 0
        self.elementwise: Any = operations(self.shape.compile, flat.working.device)

        def weight(*names: str) -> Weight:
            return Weight(flat.joined(flat.working, names), flat.joined(flat.grad, names))

        self.fc, self.hidden_norm, self.norm = (
            weight("fc.weight"),
            weight("hidden_norm.weight"),
            weight("norm.weight"),
        )
        self.layers = [layer_weights(weight, f"layers.{i}.") for i in range(self.shape.layers)]

    def __call__(
        self,
        features: torch.Tensor,
        x: torch.Tensor,
        layout: BlockLayout,
        limits: Limits | None,
    ) -> torch.Tensor:
        """Normed states of the slots 1..; the backward adds the gradients of all weights.

        Args:
            features: `[batch, context, K*H]`.
            x: `[batch*anchors*block, H]`, overwritten.
        """
        return StackFunction.apply(self.trigger, self, features, x, layout, limits)


@dataclass(slots=True)
class _Normed:
    """A norm's output and what its backward needs."""

    hat: torch.Tensor
    inverse: torch.Tensor
    out: torch.Tensor


class _Pass:
    """One forward and its backward: the shapes, and the buffers that live between the two."""

    def __init__(
        self, stack: Stack, features: torch.Tensor, layout: BlockLayout, limits: Limits | None
    ) -> None:
        self.stack, self.number = stack, stack.passes
        shape = stack.shape
        self.shape, self.dtype, self.take, self.elementwise = (
            shape,
            stack.dtype,
            stack.workspace.take,
            stack.elementwise,
        )
        self.features = features.flatten(0, 1)
        self.batch, self.count = layout.anchors.shape
        self.size, self.context = layout.block_size, layout.context
        self.rows = self.batch * self.count * self.size
        self.heads, self.kv_heads, self.d = shape.heads, shape.kv_heads, shape.head_dim
        self.groups = self.heads // self.kv_heads
        self.kernels = {
            window: self._kernel(layout, limits, window)
            for window in {shape.window(i) for i in range(shape.layers)}
        }
        stack.rotary.grow(self.context + self.size, features.device, self.dtype)
        cos, sin = stack.rotary.cos, stack.rotary.sin
        positions = slot_positions(layout.anchors, self.size)
        # [batch, anchors, block, 1, 1, d] and [1, context, 1, d]; queries may be scaled as they are turned.
        self.slot_tables = (cos[positions][:, :, :, None, None], sin[positions][:, :, :, None, None])
        scale = 1.0 if next(iter(self.kernels.values())).scales_queries else self.d**-0.5
        self.query_tables = (self.slot_tables[0] * scale, self.slot_tables[1] * scale)
        self.context_tables = (cos[: self.context][None, :, None], sin[: self.context][None, :, None])
        self.saved: list[dict[str, Any]] = []

    def _kernel(self, layout: BlockLayout, limits: Limits | None, window: int | None) -> Any:
        kind = self.shape.attention
        if kind == "auto":
            kind = "flex" if layout.anchors.is_cuda else "split"
        if kind == "split":
            return SplitKernel(layout, limits, window, self.groups, self.dtype, self.stack.workspace)
        return AutogradAttention(prepare(kind, layout, window, self.dtype), layout, self.stack.workspace)

    # ---- forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stack, take = self.stack, self.take
        fused = take("fc", (self.batch * self.context, self.shape.hidden_size), self.dtype)
        stack.fc.product(self.features, fused)
        self.feature = self._norm("feature", fused, stack.hidden_norm)
        for index, weights in enumerate(stack.layers):
            self.saved.append({})
            self._attend(index, weights, x)
            self._feed(index, weights, x)
        inner = scored_slots(x.view(self.batch * self.count, self.size, -1))
        self.last = self._norm("last", inner, stack.norm)
        return self.last.out.view(self.batch, self.count, self.size - 1, -1)

    def _norm(self, name: str, x: torch.Tensor, weight: Weight) -> _Normed:
        take, shape = self.take, x.shape
        hat = take(f"hat.{name}", shape, self.dtype)
        inverse = take(f"inverse.{name}", (*shape[:-1], 1), torch.float32)
        self.elementwise.norm_forward(x, self.shape.rms_norm_eps, hat, inverse, self._wide(shape))
        out = torch.mul(hat, weight.value, out=take(f"normed.{name}", shape, self.dtype))
        return _Normed(hat, inverse, out)

    def _wide(self, shape: Sequence[int]) -> torch.Tensor | None:
        return None if self.dtype == torch.float32 else self.take("wide", shape, torch.float32)

    def _head_norm(self, name: str, x: torch.Tensor) -> _Normed:
        """Norm over each head without its weight, which goes into the rotary tables. `x` `[rows, heads, d]`,
        strided."""
        hat = self.take(f"hat.{name}", x.shape, self.dtype)
        inverse = self.take(f"inverse.{name}", (*x.shape[:-1], 1), torch.float32)
        self.elementwise.norm_forward(x, self.shape.rms_norm_eps, hat, inverse, self._wide(x.shape))
        return _Normed(hat, inverse, hat)

    def _context_keys(self, index: int, weights: LayerWeights) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in the buffers of the layer's kernel."""
        batch, context, kv_heads, d = self.batch, self.context, self.kv_heads, self.d
        both = self.take("context_kv", (batch * context, 2 * kv_heads * d), self.dtype)
        weights.kv.product(self.feature.out, both)
        split = both.view(batch * context, 2, kv_heads, d)
        normed = self._head_norm(f"context_key{index}", split[:, 0])
        self.saved[index]["context"] = normed
        room = self.kernels[self.shape.window(index)].context_buffer
        keys, values = (
            room(f"context_{name}{index}", kv_heads, d, self.dtype) for name in ("keys", "values")
        )
        tables = self.elementwise.weighted_tables(self.context_tables, weights.k_norm.value)
        self.elementwise.rotate_into(
            normed.hat.view(batch, context, kv_heads, d), tables, keys[:, :, -context:].transpose(1, 2)
        )
        values[:, :, -context:].transpose(1, 2).copy_(split[:, 1].view(batch, context, kv_heads, d))
        return keys, values

    def _attend(self, index: int, weights: LayerWeights, x: torch.Tensor) -> None:
        take, saved, rows, d = self.take, self.saved[index], self.rows, self.d
        batch, count, size, kv_heads, groups = self.batch, self.count, self.size, self.kv_heads, self.groups
        context_key, context_value = self._context_keys(index, weights)
        projected = self._projected(index)
        normed = saved["norm1"] = self._norm(
            f"norm1.{index}", projected.states(x, self.stack.workspace), weights.norm1
        )
        qkv = take("qkv", (normed.out.shape[0], self.heads + 2 * kv_heads, d), self.dtype)
        weights.qkv.product(normed.out, qkv.flatten(1))
        query = take(f"query{index}", (batch, kv_heads, count, groups * size, d), self.dtype)
        key = take(f"key{index}", (batch, kv_heads, count, size, d), self.dtype)
        value = take(f"value{index}", (batch, kv_heads, count, size, d), self.dtype)
        parts = (
            ("q", qkv[:, : self.heads], weights.q_norm, self.query_tables, query),
            ("k", qkv[:, self.heads : -kv_heads], weights.k_norm, self.slot_tables, key),
        )
        for name, part, weight, plain, out in parts:
            head = saved[name] = self._head_norm(f"{name}{index}", part)
            cos, sin = self.elementwise.weighted_tables(plain, weight.value)
            for slots, states in projected.spread(head.hat):
                self.elementwise.rotate_into(
                    states, (cos[:, :, slots], sin[:, :, slots]), self._rows_first(out)[:, :, slots]
                )
        for slots, states in projected.spread(qkv[:, -kv_heads:]):
            self._rows_first(value)[:, :, slots].copy_(states)
        kernel = self.kernels[self.shape.window(index)]
        out, saved["attention"] = kernel.forward(index, query, key, value, context_key, context_value)
        attended = take(f"attended_rows{index}", (rows, self.heads * d), self.dtype)
        attended.view(batch, count, size, kv_heads, groups, d).copy_(self._rows_first(out))
        saved["attended"] = attended
        x.addmm_(attended, weights.out.value.t())

    def _projected(self, index: int) -> Rows:
        kind = DistinctRows if index == 0 else EveryRow
        return kind(self.batch, self.count, self.size, self.kv_heads)

    def _rows_first(self, states: torch.Tensor) -> torch.Tensor:
        """`[batch, kv_heads, anchors, groups*block, d]` seen as `[batch, anchors, block, kv_heads, groups,
        d]`."""
        view = states.view(self.batch, self.kv_heads, self.count, -1, self.size, self.d)
        return view.permute(0, 2, 4, 1, 3, 5)

    def _feed(self, index: int, weights: LayerWeights, x: torch.Tensor) -> None:
        take, saved, inner = self.take, self.saved[index], self.shape.intermediate_size
        normed = saved["norm2"] = self._norm(f"norm2.{index}", x, weights.norm2)
        gate_up = saved["gate_up"] = take(f"gate_up{index}", (self.rows, 2 * inner), self.dtype)
        weights.gate_up.product(normed.out, gate_up)
        activated = saved["activated"] = take(f"activated{index}", (self.rows, inner), self.dtype)
        gated = saved["gated"] = take(f"gated{index}", (self.rows, inner), self.dtype)
        self.elementwise.gate_forward(gate_up[:, :inner], gate_up[:, inner:], activated, gated)
        x.addmm_(gated, weights.down.value.t())

    # ---- backward

    def backward(self, dhidden: torch.Tensor) -> None:
        """Add the gradients of all weights into the flat buffer. `dhidden` `[batch, anchors, block-1, H]` is
        overwritten."""
        stack, take = self.stack, self.take
        if self.number != stack.passes:
            raise RuntimeError(
                "another forward has used this drafter's buffers: run backward before the next forward"
            )
        hidden = self.shape.hidden_size
        dfeature = take("dfeature", (self.batch * self.context, hidden), self.dtype).zero_()
        dx = take("dx", (self.rows, hidden), self.dtype).zero_()
        inner = scored_slots(dx.view(self.batch * self.count, self.size, -1))
        self._norm_backward(self.last, dhidden.view(-1, hidden), stack.norm, inner)
        for index in reversed(range(len(stack.layers))):
            self._feed_backward(index, stack.layers[index], dx)
            self._attend_backward(index, stack.layers[index], dx, dfeature)
            if stack.after_layer is not None:
                stack.after_layer(index)
        dfused = take("dfused", dfeature.shape, self.dtype).zero_()
        self._norm_backward(self.feature, dfeature, stack.hidden_norm, dfused)
        stack.fc.add_grad(dfused, self.features)
        stack.workspace.checking = False

    def _norm_backward(
        self, normed: _Normed, dy: torch.Tensor, weight: Weight, into: torch.Tensor | None
    ) -> None:
        """Add the gradient of a norm's weight, and of its input to `into`; `dy` is overwritten."""
        hat = normed.hat.view(dy.shape)
        product = self.take("product", dy.shape, self.dtype)
        dhat = self.elementwise.norm_backward(dy, hat, normed.inverse, weight.value, weight.grad, product)
        if into is not None:
            into.addcmul_(dhat.view(into.shape), normed.inverse.view(*into.shape[:-1], 1).to(self.dtype))

    def _feed_backward(self, index: int, weights: LayerWeights, dx: torch.Tensor) -> None:
        take, saved, inner = self.take, self.saved[index], self.shape.intermediate_size
        dgated = torch.mm(dx, weights.down.value, out=take("dgated", (self.rows, inner), self.dtype))
        weights.down.add_grad(dx, saved["gated"])
        gate_up = saved["gate_up"]
        dgate_up = take("dgate_up", gate_up.shape, self.dtype)
        self.elementwise.gate_backward(
            dgated,
            gate_up[:, :inner],
            gate_up[:, inner:],
            saved["activated"],
            dgate_up[:, :inner],
            dgate_up[:, inner:],
        )
        weights.gate_up.add_grad(dgate_up, saved["norm2"].out)
        dy = torch.mm(dgate_up, weights.gate_up.value, out=take("dnormed", dx.shape, self.dtype))
        self._norm_backward(saved["norm2"], dy, weights.norm2, dx)

    def _attend_backward(
        self, index: int, weights: LayerWeights, dx: torch.Tensor, dfeature: torch.Tensor
    ) -> None:
        take, saved, rows, d = self.take, self.saved[index], self.rows, self.d
        batch, context, kv_heads = self.batch, self.context, self.kv_heads
        projected, normed = self._projected(index), saved["norm1"]
        dattended = torch.mm(dx, weights.out.value, out=take("dattended", (rows, self.heads * d), self.dtype))
        weights.out.add_grad(dx, saved["attended"])
        dout = take("dout", (batch, kv_heads, self.count, self.groups * self.size, d), self.dtype)
        self._rows_first(dout).copy_(dattended.view(batch, self.count, self.size, kv_heads, self.groups, d))
        kernel = self.kernels[self.shape.window(index)]
        dquery, dkey, dvalue, dfar_key, dfar_value = kernel.backward(saved["attention"], dout)
        dqkv = take("dqkv", (normed.out.shape[0], self.heads + 2 * kv_heads, d), self.dtype)
        for name, dy, weight, tables, part in (
            ("q", dquery, weights.q_norm, self.query_tables, dqkv[:, : self.heads]),
            ("k", dkey, weights.k_norm, self.slot_tables, dqkv[:, self.heads : -kv_heads]),
        ):
            turned = self._turned_back(self._rows_first(dy), tables)
            gathered = projected.gathered(turned, self.stack.workspace)
            self._head_norm_backward(saved[name], gathered, weight, part)
            del turned, gathered  # or the next one would find its buffer in use
        projected.gather(self._rows_first(dvalue), dqkv[:, -kv_heads:])
        flat = dqkv.flatten(1)
        weights.qkv.add_grad(flat, normed.out)
        dy = torch.mm(flat, weights.qkv.value, out=take("dnormed", normed.out.shape, self.dtype))
        # The first layer's input is the frozen embedding: only the norm's weight wants a gradient there.
        self._norm_backward(normed, dy, weights.norm1, dx if index else None)
        dboth = take("dcontext_kv", (batch * context, 2 * kv_heads * d), self.dtype)
        dsplit = dboth.view(batch * context, 2, kv_heads, d)
        turned = self._turned_back(dfar_key.transpose(1, 2), self.context_tables)
        self._head_norm_backward(saved["context"], turned.flatten(0, 1), weights.k_norm, dsplit[:, 0])
        dsplit[:, 1].view(batch, context, kv_heads, d).copy_(dfar_value.transpose(1, 2))
        weights.kv.add_grad(dboth, self.feature.out)
        dfeature.addmm_(dboth, weights.kv.value)

    def _turned_back(self, dy: torch.Tensor, tables: elementwise.Tables) -> torch.Tensor:
        """The gradient of what was rotated, in a buffer of its own: `dy` may be strided."""
        turned = self.take("dturned", dy.shape, self.dtype)
        self.elementwise.rotate_back_into(dy, tables, turned)
        return turned

    def _head_norm_backward(self, head: _Normed, dy: torch.Tensor, weight: Weight, out: torch.Tensor) -> None:
        """Through the norm of each head: `dy` `[rows, heads, d]`, overwritten; `out` of its shape,
        strided."""
        flat = dy.view(-1, self.d)
        product = self.take("product", flat.shape, self.dtype)
        dhat = self.elementwise.norm_backward(
            flat, head.hat.view(-1, self.d), head.inverse, weight.value, weight.grad, product
        )
        torch.mul(dhat.view(out.shape), head.inverse.to(self.dtype), out=out)


class StackFunction(torch.autograd.Function):
    """Ties the written-out pass to autograd: gradients of weights go to the flat buffer, none to the
    inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        trigger: torch.Tensor,
        stack: Stack,
        features: torch.Tensor,
        x: torch.Tensor,
        layout: BlockLayout,
        limits: Limits | None,
    ) -> torch.Tensor:
        stack.passes += 1
        ctx.run = _Pass(stack, features, layout, limits)
        return ctx.run.forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.run.backward(grads[0].contiguous())
        ctx.run = None
        return None, None, None, None, None, None
