"""One training step of our drafter, for a timing against the other trainers' side by side.

    python step.py --ours bench.peers:make_step

The step is the whole of the drafter worker's: anchors and labels drawn anew, forward, loss, backward, clip, optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dflash.models.blocks import BlockGeometry, context_limits, sample_anchors, slot_labels
from dflash.models.drafter import Drafter, DrafterShape
from dflash.models.objective import BlockObjective
from dflash.models.optimizer import FlatAdamW, FlatParameters


def make_step(shape: Any) -> tuple[Callable[[], torch.Tensor], int]:
    """A step function and the number of trained parameters.

    Args:
        shape: has hidden, intermediate, layers, heads, kv_heads, head_dim, vocab, batch, context, anchors, block, taps and
            torch_dtype.
    """
    dtype = shape.torch_dtype
    drafter = Drafter(
        DrafterShape(
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            layers=shape.layers,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            block_size=shape.block,
            vocab_size=shape.vocab,
            mask_token_id=shape.vocab - 1,
            target_layers=12,
            target_layer_ids=tuple(range(1, 1 + shape.taps)),
        )
    )
    flat = FlatParameters(drafter, torch.device("cpu"), dtype)
    optimizer = FlatAdamW(flat, clip=1.0)
    objective = BlockObjective()
    geometry = BlockGeometry(shape.anchors, shape.block)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, shape.vocab - 1, (shape.batch, shape.context), generator=generator)
    features = torch.randn(shape.batch, shape.context, shape.taps * shape.hidden, generator=generator).to(dtype)
    embedding = torch.randn(shape.vocab, shape.hidden, generator=generator).to(dtype)
    head = (torch.randn(shape.vocab, shape.hidden, generator=generator) * shape.hidden**-0.5).to(dtype)
    mask = np.ones((shape.batch, shape.context), bool)
    rng = np.random.default_rng(0)
    starts = torch.zeros(shape.batch, shape.anchors, dtype=torch.int64)

    def step() -> torch.Tensor:
        drawn = [sample_anchors(row, shape.anchors, rng) for row in mask]
        anchors, keep = (np.stack(parts) for parts in zip(*drawn, strict=True))
        labels, weights = slot_labels(ids.numpy(), mask, anchors, keep, geometry)
        scale = 1.0 / float(weights.sum())
        limits = context_limits(anchors, keep, np.zeros_like(anchors), shape.context)
        hidden = drafter(features, ids, torch.from_numpy(anchors), torch.from_numpy(keep), starts, embedding, limits)
        loss, _ = objective(hidden, head, torch.from_numpy(labels), torch.from_numpy(weights), scale)
        loss.backward()
        optimizer.step(1e-4)
        flat.zero_grad()
        return loss.detach()

    return step, sum(parameter.numel() for parameter in drafter.parameters())
