"""The drafter's weights as the written-out pass multiplies by them: matrices that lie side by side as one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Weight:
    """One or more parameters that lie side by side: their values and their gradients, as one matrix or
    vector."""

    value: torch.Tensor
    grad: torch.Tensor

    def product(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """`out` = x W^T."""
        return torch.mm(x, self.value.t(), out=out)

    def add_grad(self, dy: torch.Tensor, x: torch.Tensor) -> None:
        self.grad.addmm_(dy.t(), x)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    norm1: Weight
    qkv: Weight
    kv: Weight
    q_norm: Weight
    k_norm: Weight
    out: Weight
    norm2: Weight
    gate_up: Weight
    down: Weight


def layer_weights(weight: Any, prefix: str) -> LayerWeights:
    """Of the layer whose parameters' names begin with `prefix`; `weight` finds them by name."""
    attention = prefix + "self_attn."
    return LayerWeights(
        norm1=weight(prefix + "input_layernorm.weight"),
        qkv=weight(*(f"{attention}{name}_proj.weight" for name in "qkv")),
        kv=weight(*(f"{attention}{name}_proj.weight" for name in "kv")),
        q_norm=weight(attention + "q_norm.weight"),
        k_norm=weight(attention + "k_norm.weight"),
        out=weight(attention + "o_proj.weight"),
        norm2=weight(prefix + "post_attention_layernorm.weight"),
        gate_up=weight(prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight"),
        down=weight(prefix + "mlp.down_proj.weight"),
    )
