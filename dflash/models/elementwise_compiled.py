"""The operations of `elementwise.py` stated for torch.compile, which makes one kernel of each
(`drafter.compile`).

Meant for a GPU, where each pass over memory is a kernel of its own. Compiled once for each device, on first
use: the trainer's warm-up runs it before any worker starts."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from dflash.models import elementwise
from steptime import regions


def _norm_forward(
    x: torch.Tensor, eps: float, hat: torch.Tensor, inverse: torch.Tensor, wide: torch.Tensor | None = None
) -> None:
    wider = x.float()
    scale = torch.rsqrt(wider.square().mean(dim=-1, keepdim=True) + eps)
    inverse.copy_(scale)
    hat.copy_(wider * scale)


def _norm_backward(
    dy: torch.Tensor,
    hat: torch.Tensor,
    inverse: torch.Tensor,
    weight: torch.Tensor,
    weight_grad: torch.Tensor,
    product: torch.Tensor,
) -> torch.Tensor:
    wide_dy, wide_hat, wide_weight = dy.float(), hat.float(), weight.float()
    weight_grad.add_((wide_dy * wide_hat).sum(dim=0))
    dhat = wide_dy * wide_weight
    return (dhat - wide_hat * (dhat * wide_hat).mean(dim=-1, keepdim=True)).to(dy.dtype)


def _rotate_into(x: torch.Tensor, tables: elementwise.Tables, out: torch.Tensor) -> None:
    cos, sin = tables
    out.copy_(x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin)


def _rotate_back_into(dy: torch.Tensor, tables: elementwise.Tables, out: torch.Tensor) -> None:
    cos, sin = tables
    out.copy_(dy * cos + (dy * sin).roll(dy.shape[-1] // 2, dims=-1))


def _gate_forward(gate: torch.Tensor, up: torch.Tensor, activated: torch.Tensor, out: torch.Tensor) -> None:
    value = torch.nn.functional.silu(gate)
    activated.copy_(value)
    out.copy_(value * up)


def _gate_backward(
    dout: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    activated: torch.Tensor,
    gate_grad: torch.Tensor,
    up_grad: torch.Tensor,
) -> None:
    wide, sigmoid = gate.float(), gate.float().sigmoid()
    up_grad.copy_(dout * activated)
    gate_grad.copy_(dout.float() * up * sigmoid * (1.0 + wide * (1.0 - sigmoid)))


def operations(choice: bool | str, device: torch.device) -> Any:
    """The module or the namespace that `drafter.compile` asks for on a device.

    `auto` is a rule and not a race against the clock, so that one machine gives one result every time: on
    the CPU the compiled operations were measured to be slower, and without Triton there are none for a GPU.
    """
    if choice == "auto":
        choice = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    return compiled(device) if choice else elementwise


@functools.cache
def compiled(device: torch.device, backend: str | Callable[..., Any] = "inductor") -> Any:
    """The operations, each compiled for any size on one device."""
    place = f"{device.type}_{device.index or 0}"

    def make(function: Any) -> Any:
        name = f"{function.__name__.lstrip('_')}_{place}"
        return regions.compiled(function, name, dynamic=True, backend=backend)

    return SimpleNamespace(
        norm_forward=make(_norm_forward),
        norm_backward=make(_norm_backward),
        rotate_into=make(_rotate_into),
        rotate_back_into=make(_rotate_back_into),
        gate_forward=make(_gate_forward),
        gate_backward=make(_gate_backward),
        weighted_tables=elementwise.weighted_tables,
    )
