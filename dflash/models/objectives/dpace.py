"""D-PACE (arXiv 2605.18810): cross entropy, each slot weighted by how surely the drafter comes that far."""

from __future__ import annotations

import torch

from dflash.models.objectives.ce import CrossEntropy


class DPace(CrossEntropy):
    """With q = exp(-CE) and qs = (1-alpha) q + alpha, C_j the product of qs up to j, the weight of j is the
    sum of C_m over m >= j; an unsupervised slot is factor 1 in the product and 0 in the sum.

    The weighted sum is divided by the sum of the fixed decay's weights, in the gradient as in the reported
    loss: that sum is known before the step, and no weight of its own can shrink the loss by growing."""

    name = "dpace"

    def slot_weights(self, loss: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        supervised, alpha = weights > 0, self.config.dpace_alpha
        certainty = (1.0 - alpha) * torch.exp(-loss) + alpha
        reach = torch.where(supervised, certainty, 1.0).cumprod(dim=1)
        reach = torch.where(supervised, reach, 0.0)
        tail = reach.flip(1).cumsum(dim=1).flip(1)
        return torch.where(supervised, tail, 0.0)
