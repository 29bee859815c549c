"""Small batches and drafters for the tests of the models."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch

from dflash.data.anchors import (
    BlockGeometry,
    Limits,
    context_limits,
    document_starts,
    sample_anchors,
    slot_labels,
)
from dflash.models.drafter import Drafter, DrafterShape
from dflash.models.objectives.base import BlockObjective
from dflash.models.objectives.ce import CrossEntropy
from dflash.models.optimizer import FlatParameters
from dflash.models.stack import Stack

SHAPE = DrafterShape(
    hidden_size=32,
    intermediate_size=64,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=16,
    block_size=6,
    vocab_size=97,
    mask_token_id=96,
    target_layers=12,
    target_layer_ids=(1, 4, 9),
    attention="dense",
)


@dataclass(frozen=True)
class Case:
    """A batch as a drafter gets it, and the target's frozen ends."""

    geometry: BlockGeometry
    input_ids: torch.Tensor
    loss_mask: np.ndarray
    features: torch.Tensor
    anchors: torch.Tensor
    keep: torch.Tensor
    document_start: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    embedding: torch.Tensor
    head: torch.Tensor

    @property
    def limits(self) -> Limits:
        places = (self.anchors.numpy(), self.keep.numpy(), self.document_start.numpy())
        return context_limits(*places, self.input_ids.shape[1], chunk=3, grain=8)

    @property
    def scale(self) -> float:
        return 1.0 / float(self.weights.sum())

    def changed(self, **fields: object) -> Case:
        return dataclasses.replace(self, **fields)


def make_case(
    shape: DrafterShape = SHAPE,
    batch: int = 2,
    context: int = 44,
    anchors: int = 10,
    seed: int = 0,
    *,
    dropped: bool = False,
    documents: bool = False,
) -> Case:
    """A random batch. `dropped`: one row has fewer candidates than anchors. `documents`: each row holds two
    of them."""
    rng = np.random.default_rng(seed)
    geometry = BlockGeometry(anchors, shape.block_size)
    ids = rng.integers(0, shape.vocab_size - 1, (batch, context))
    mask = np.ones((batch, context), bool)
    mask[:, :5] = False
    if dropped:
        mask[-1] = False
        mask[-1, 7:12] = True
    ids_of = (
        np.broadcast_to((np.arange(context) >= context // 3).astype(np.int64), (batch, context))
        if documents
        else None
    )
    drawn = [
        sample_anchors(mask[r], anchors, rng, None if ids_of is None else ids_of[r]) for r in range(batch)
    ]
    places, keep = (np.stack(parts) for parts in zip(*drawn, strict=True))
    labels, weights = slot_labels(ids, mask, places, keep, geometry, ids_of)
    starts = np.stack(
        [document_starts(places[r], None if ids_of is None else ids_of[r]) for r in range(batch)]
    )
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    return Case(
        geometry=geometry,
        input_ids=torch.from_numpy(ids),
        loss_mask=mask,
        features=draw(batch, context, shape.taps * shape.hidden_size),
        anchors=torch.from_numpy(places),
        keep=torch.from_numpy(keep),
        document_start=torch.from_numpy(starts),
        labels=torch.from_numpy(labels),
        weights=torch.from_numpy(weights),
        embedding=draw(shape.vocab_size, shape.hidden_size),
        head=draw(shape.vocab_size, shape.hidden_size) * shape.hidden_size**-0.5,
    )


def make_drafter(seed: int = 1, **changes: object) -> Drafter:
    """A drafter with norms that are no ones, and weights large enough for attention to be uneven."""
    drafter = Drafter(dataclasses.replace(SHAPE, **changes), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
            else:
                parameter.mul_(5.0)
    return drafter


def run(
    drafter: Drafter, case: Case, dtype: torch.dtype = torch.float32, limits: Limits | None = None
) -> torch.Tensor:
    """Normed hidden states of slots 1.. of a case."""
    return drafter(
        case.features.to(dtype),
        case.input_ids,
        case.anchors,
        case.keep,
        case.document_start,
        case.embedding.to(dtype),
        limits,
    )


def flatten(drafter: Drafter, device: torch.device, dtype: torch.dtype) -> FlatParameters:
    """As a run has it: flat buffers, and the written-out pass over them."""
    flat = FlatParameters(drafter, device, dtype)
    drafter.stack = Stack(drafter, flat)
    return flat


def loss_of(hidden: torch.Tensor, case: Case, objective: BlockObjective | None = None) -> torch.Tensor:
    objective = objective or CrossEntropy()
    loss, _ = objective(hidden, case.head.to(hidden.dtype), case.labels, case.weights, case.scale)
    return loss


def gradients(drafter: Drafter) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.float().clone()
        for name, parameter in drafter.named_parameters()
        if parameter.grad is not None
    }
