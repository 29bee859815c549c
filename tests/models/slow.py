"""The drafter stated slowly: block by block, slot by slot, in float64, from a state dict alone.

It shares no code with the package. A block sees the features of its document strictly before its anchor and
its own slots; every token stands at its place in the row."""

from __future__ import annotations

import torch

from dflash.models.drafter import DrafterShape
from tests.models.cases import Case


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rope(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """`x` `[n, heads, d]`: channel i turns with channel i + d/2."""
    half = x.shape[-1] // 2
    angle = positions[:, None, None].double() * theta ** (-torch.arange(half).double() / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1
    )


def slow_forward(state: dict[str, torch.Tensor], shape: DrafterShape, case: Case) -> torch.Tensor:
    """Normed hidden states of slots 1.., `[batch, anchors, B-1, H]` float64; zeros for dropped blocks."""
    state = {name: tensor.double() for name, tensor in state.items()}
    batch, count = case.anchors.shape
    out = torch.zeros(batch, count, shape.block_size - 1, shape.hidden_size, dtype=torch.float64)
    for row in range(batch):
        for n in range(count):
            if case.keep[row, n]:
                out[row, n] = _block(
                    state, shape, case, row, int(case.anchors[row, n]), int(case.document_start[row, n])
                )
    return out


def _block(state, shape: DrafterShape, case: Case, row: int, anchor: int, start: int) -> torch.Tensor:
    eps, size = shape.rms_norm_eps, shape.block_size
    feature = rms(
        case.features[row, start:anchor].double() @ state["fc.weight"].T, state["hidden_norm.weight"], eps
    )
    tokens = [int(case.input_ids[row, anchor])] + [shape.mask_token_id] * (size - 1)
    x = case.embedding[tokens].double()
    far, near = torch.arange(start, anchor), anchor + torch.arange(size)
    for i in range(shape.layers):
        layer = {
            name.removeprefix(f"layers.{i}."): t
            for name, t in state.items()
            if name.startswith(f"layers.{i}.")
        }
        inner = rms(x, layer["input_layernorm.weight"], eps)
        x = x + _attend(layer, shape, inner, feature, far, near, shape.window(i))
        inner = rms(x, layer["post_attention_layernorm.weight"], eps)
        gate = inner @ layer["mlp.gate_proj.weight"].T
        x = (
            x
            + (gate * gate.sigmoid() * (inner @ layer["mlp.up_proj.weight"].T))
            @ layer["mlp.down_proj.weight"].T
        )
    return rms(x, state["norm.weight"], eps)[1:]


def _attend(layer, shape: DrafterShape, x, feature, far, near, window: int | None) -> torch.Tensor:
    eps, d = shape.rms_norm_eps, shape.head_dim

    def project(name: str, states: torch.Tensor, heads: int) -> torch.Tensor:
        return (states @ layer[f"self_attn.{name}_proj.weight"].T).view(len(states), heads, d)

    both, places = torch.cat([feature, x]), torch.cat([far, near])
    query = rope(
        rms(project("q", x, shape.heads), layer["self_attn.q_norm.weight"], eps), near, shape.rope_theta
    )
    key = rope(
        rms(project("k", both, shape.kv_heads), layer["self_attn.k_norm.weight"], eps),
        places,
        shape.rope_theta,
    )
    value = project("v", both, shape.kv_heads)
    out = torch.zeros(len(x), shape.heads, d, dtype=torch.float64)
    for slot, position in enumerate(near.tolist()):
        columns = torch.ones(len(places), dtype=torch.bool)
        if window is not None:
            columns = (places <= position) & (position - places < window)
        for head in range(shape.heads):
            group = head // (shape.heads // shape.kv_heads)
            weights = (key[columns, group] @ query[slot, head] * d**-0.5).softmax(0)
            out[slot, head] = weights @ value[columns, group]
    return out.flatten(1) @ layer["self_attn.o_proj.weight"].T
