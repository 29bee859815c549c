"""Distillation: a mix of cross entropy and the divergence from the target's own distribution."""

from __future__ import annotations

import torch

from dflash.models.objectives.base import BlockObjective, SlotLoss

_SLICE = 64  # rows of logits whose exponentials may exist beside the chunk


class Distillation(BlockObjective):
    """The slope of the mix in the draft's logits is p - mix * teacher's p - (1 - mix) at the label."""

    name = "kd"
    needs_teacher = True

    def slot_loss(
        self,
        logits: torch.Tensor,
        best: torch.Tensor,
        labels: torch.Tensor,
        teacher: torch.Tensor | None,
    ) -> SlotLoss:
        assert teacher is not None
        mix = self.config.kd_weight
        log_p, log_t = _log_softmax_(logits), _log_softmax_(teacher)
        cross_entropy = -log_p.gather(1, labels)
        pairs = zip(log_t.split(_SLICE), log_p.split(_SLICE), strict=True)
        divergence = torch.cat([(t.exp() * (t - p)).sum(dim=-1, keepdim=True) for t, p in pairs])
        loss = (1.0 - mix) * cross_entropy + mix * divergence
        return SlotLoss(loss, log_p.exp_().sub_(log_t.exp_(), alpha=mix), share=1.0 - mix)


def _log_softmax_(logits: torch.Tensor) -> torch.Tensor:
    """In place, some rows at a time, so that no second tensor of this size exists."""
    logits.sub_(logits.amax(dim=-1, keepdim=True))
    total = torch.cat([part.exp().sum(dim=-1, keepdim=True) for part in logits.split(_SLICE)])
    return logits.sub_(total.log_())
