"""The drafter's elementwise operations with their backward written out, over buffers that are given and never
made here.

Automatic differentiation would give the same numbers; it would also keep every intermediate, allocate each
anew and pass over memory two or three times as often. The module in `drafter.py` states the same mathematics
plainly; tests hold these to it. Shapes: `x` and what is of its shape `[..., n]`; `inverse` `[..., 1]`
float32. `wide` is float32 scratch of x's shape, used when x is not float32."""

from __future__ import annotations

import torch

Tables = tuple[torch.Tensor, torch.Tensor]
"""cos and signed sin (the first half negated), broadcastable to the states they rotate."""


def norm_forward(
    x: torch.Tensor, eps: float, hat: torch.Tensor, inverse: torch.Tensor, wide: torch.Tensor | None = None
) -> None:
    """`hat` = x / rms(x), rounded to its type; `inverse` = 1 / rms(x). The weight comes after, as in the
    released models."""
    source = x
    if wide is not None:
        source = wide.copy_(x)
    torch.linalg.vector_norm(source, dim=-1, keepdim=True, out=inverse)
    inverse.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    if wide is None:
        torch.mul(source, inverse, out=hat)
    else:
        hat.copy_(wide.mul_(inverse))


def norm_backward(
    dy: torch.Tensor,
    hat: torch.Tensor,
    inverse: torch.Tensor,
    weight: torch.Tensor,
    weight_grad: torch.Tensor,
    product: torch.Tensor,
) -> torch.Tensor:
    """From the gradient of `hat * weight`: adds the weight's, and leaves in `dy` what times `inverse` is the
    gradient of x.

    All `[rows, n]`, contiguous; `dy` and `product` (scratch) are overwritten.
    """
    torch.mul(dy, hat, out=product)
    weight_grad.add_(product.sum(dim=0))
    along = torch.mv(product, weight).unsqueeze_(-1)
    return dy.mul_(weight).addcmul_(hat, along, value=-1.0 / dy.shape[-1])


def weighted_tables(tables: Tables, weight: torch.Tensor) -> Tables:
    """The rotary tables with a norm's weight multiplied in: rotating `hat` by them rotates `hat * weight`
    plainly."""
    cos, sin = tables
    return cos * weight, sin * weight.roll(weight.shape[-1] // 2)


def rotate_into(x: torch.Tensor, tables: Tables, out: torch.Tensor) -> None:
    """`out` = x * cos + (x with its halves swapped) * signed sin. `out` may be any view of x's shape, but not
    x."""
    cos, sin = tables
    half = x.shape[-1] // 2
    for first, second in ((slice(None, half), slice(half, None)), (slice(half, None), slice(None, half))):
        part = torch.mul(x[..., first], cos[..., first], out=out[..., first])
        part.addcmul_(x[..., second], sin[..., first])


def rotate_back_into(dy: torch.Tensor, tables: Tables, out: torch.Tensor) -> None:
    """The transpose of `rotate_into`: the gradient of what was rotated."""
    cos, sin = tables
    half = dy.shape[-1] // 2
    for first, second in ((slice(None, half), slice(half, None)), (slice(half, None), slice(None, half))):
        part = torch.mul(dy[..., first], cos[..., first], out=out[..., first])
        part.addcmul_(dy[..., second], sin[..., second])


def gate_forward(gate: torch.Tensor, up: torch.Tensor, activated: torch.Tensor, out: torch.Tensor) -> None:
    """`activated` = silu(gate), `out` = silu(gate) * up."""
    torch.ops.aten.silu.out(gate, out=activated)
    torch.mul(activated, up, out=out)


def gate_backward(
    dout: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    activated: torch.Tensor,
    gate_grad: torch.Tensor,
    up_grad: torch.Tensor,
) -> None:
    """The gradients of gate and up; `dout` is overwritten."""
    torch.mul(dout, activated, out=up_grad)
    dout.mul_(up)
    torch.ops.aten.silu_backward.grad_input(dout, gate, grad_input=gate_grad)
