"""Cross entropy, each slot weighted by its distance from the anchor. Reference 1.8."""

from __future__ import annotations

import torch

from dflash.models.objectives.base import BlockObjective, SlotLoss


class CrossEntropy(BlockObjective):
    name = "ce"

    def slot_loss(
        self,
        logits: torch.Tensor,
        best: torch.Tensor,
        labels: torch.Tensor,
        teacher: torch.Tensor | None,
    ) -> SlotLoss:
        at_label = logits.gather(1, labels)
        slope = logits.sub_(best).exp_()
        total = slope.sum(dim=-1, keepdim=True)
        return SlotLoss(total.log().add_(best).sub_(at_label), slope, total)
