"""Floating point operations that training asks for, by arithmetic alone. Reference 3.2.

A product of `[m, k]` and `[k, n]` is 2 m k n. Work that was asked for is counted, not what a kernel does: no
padding, no dropped block, of attention only what a slot sees, nothing that is computed twice. Operations
between the products (norms, softmax, optimizer, a linear-attention layer's recurrence) are left out, as in
everybody's MFU.

A trained matrix costs three products for each of its inputs: forward, gradient of the input, gradient of the
weight. The head is frozen, so it costs two; so does `fc`, whose input needs no gradient; the target costs
one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dflash.config import TargetConfig
from dflash.data.anchors import visible_pairs
from dflash.data.batch import BatchWork
from dflash.models.drafter import DrafterShape
from dflash.models.target import find_decoder
from dflash.models.target_info import LOADING, TargetInfo, from_config, read_config


@dataclass(frozen=True, slots=True)
class DrafterFlops:
    """One training pass, forward and backward, as a linear function of a batch's work.

    Attributes:
        token: for each context token; block: for each block; pair, sliding_pair: for each pair of a slot and
            a column that it sees, over all layers of the kind.
    """

    token: int
    block: int
    pair: int
    sliding_pair: int

    def of(self, work: BatchWork) -> int:
        """FLOPs of a batch."""
        return (
            self.token * work.tokens
            + self.block * work.blocks
            + self.pair * work.pairs
            + self.sliding_pair * work.sliding_pairs
        )


def drafter_flops(shape: DrafterShape, *, teacher: bool = False) -> DrafterFlops:
    """Of a drafter and its loss.

    Args:
        teacher: the loss also multiplies the target's last states with the head.
    """
    hidden, heads, kv = shape.hidden_size, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    keys_values = 2 * hidden * 2 * kv
    row = keys_values + 2 * hidden * (2 * heads + 3 * shape.intermediate_size)
    head = 2 * hidden * shape.vocab_size
    pair = 3 * 4 * heads
    return DrafterFlops(
        token=2 * (2 * shape.taps * hidden * hidden) + 3 * shape.layers * keys_values,
        block=3 * shape.layers * row * shape.block_size + (2 + teacher) * head * (shape.block_size - 1),
        pair=pair * (shape.layers - shape.sliding_layers),
        sliding_pair=pair * shape.sliding_layers,
    )


def full_batch(shape: DrafterShape, rows: int, length: int, anchors: int) -> BatchWork:
    """A batch without padding and with every block kept, anchors evenly over the context: for a plan, or a
    measurement with shapes alone.

    Args:
        anchors: in each row.
    """
    places = np.linspace(0, length - 1, anchors).astype(np.int64)[None].repeat(rows, axis=0)
    layout = (places, np.ones_like(places, bool), np.zeros_like(places), shape.block_size)
    sliding = visible_pairs(*layout, shape.sliding_window) if shape.sliding_layers else 0
    return BatchWork((length,) * rows, rows * anchors, visible_pairs(*layout), sliding)


@dataclass(frozen=True, slots=True)
class TargetFlops:
    """One forward pass up to the last layer that is needed.

    Attributes:
        token: for each token.
        attention: for each kind of attention layer, its window (None: full) and the FLOPs of a pair of
            tokens, over all its layers.
    """

    token: int
    attention: tuple[tuple[int | None, int], ...]

    def of(self, work: BatchWork) -> int:
        """FLOPs of a batch."""
        pairs = sum(each * causal_pairs(work.lengths, window) for window, each in self.attention)
        return self.token * work.tokens + pairs


def causal_pairs(lengths: Sequence[int], window: int | None = None) -> int:
    """Pairs of a token and one that it sees, itself included, over conversations of these lengths.

    Args:
        window: each token sees at most so many.
    """
    found = 0
    for length in lengths:
        seen = length if window is None else min(length, window)
        found += seen * (seen + 1) // 2 + (length - seen) * seen
    return found


def target_flops(config: TargetConfig, info: TargetInfo, *, to_the_end: bool = False) -> TargetFlops:
    """Of a target, from its config alone (built on the meta device). Of a mixture of experts those that a
    token visits.

    Args:
        to_the_end: every layer is run, for the last hidden states.

    Raises:
        UserError: as `inspect_target`.
    """
    text = read_config(config).get_text_config()
    with LOADING, torch.device("meta"):
        model = from_config(text)
    layers = find_decoder(model)[1]
    count = len(layers) if to_the_end else info.layer_ids[-1] + 1
    share = _expert_share(text)
    weights = sum(_weights(layer, share) for layer in list(layers)[:count])
    heads = int(text.num_attention_heads)
    each = 4 * heads * int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    kinds = (getattr(text, "layer_types", None) or ["full_attention"] * len(layers))[:count]
    full, sliding = kinds.count("full_attention"), kinds.count("sliding_attention")
    attention: list[tuple[int | None, int]] = [(None, full * each)] if full else []
    if sliding:
        attention.append((getattr(text, "sliding_window", None), sliding * each))
    return TargetFlops(2 * round(weights), tuple(attention))


def _weights(layer: torch.nn.Module, expert_share: float) -> float:
    """Elements of the matrices that a token meets in a layer."""
    found = 0.0
    for name, parameter in layer.named_parameters():
        if ".experts." in name and parameter.dim() > 1:
            found += parameter.numel() * expert_share
        elif parameter.dim() == 2:
            found += parameter.numel()
    return found


def _expert_share(text: Any) -> float:
    known = [getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")]
    count = next((int(number) for number in known if number), 0)
    visited = getattr(text, "num_experts_per_tok", None) or getattr(text, "num_experts_per_token", None)
    return int(visited) / count if count and visited else 1.0


def mfu(flops: float, seconds: float, rate: float) -> float | None:
    """Share of a machine's matmul rate (FLOPs per second) that so many FLOPs in so many seconds are; None
    where the rate or the time is not known."""
    return flops / seconds / rate if seconds > 0.0 and rate > 0.0 else None
