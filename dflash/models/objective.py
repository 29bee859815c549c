"""What the drafter minimises, computed chunk by chunk, so that the logits of one chunk are all that ever exist.

The head is frozen, so the gradient with respect to the hidden states is known as soon as a chunk's logits are: it is made in
the forward pass, and the head is multiplied twice and not three times. Reference 1.6 (memory), 1.8 (losses, weights).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dflash.config import ObjectiveConfig
from dflash.models.workspace import Workspace

STAT_NAMES = ("loss_sum", "weight_sum", "blocks", "accepted_sum")
"""Head of the statistics vector; per-slot correct (B-1) and per-slot supervised (B-1) counts follow."""

_SLICE = 64  # rows of logits whose exponentials may exist beside the chunk


@dataclass(frozen=True, slots=True)
class StatLayout:
    """Places in the float32 statistics vector of a block size; sums over vectors are statistics of the union.

    loss_sum: weighted loss, unscaled. weight_sum: its denominator. blocks: those with a supervised slot. accepted_sum: over
    those blocks, leading correct slots plus the bonus token; an unsupervised slot neither ends nor lengthens the run.
    """

    slots: int

    @property
    def width(self) -> int:
        return len(STAT_NAMES) + 2 * self.slots

    @property
    def correct(self) -> slice:
        return slice(len(STAT_NAMES), len(STAT_NAMES) + self.slots)

    @property
    def supervised(self) -> slice:
        return slice(len(STAT_NAMES) + self.slots, self.width)


class BlockObjective:
    """Cross entropy with decayed slot weights, D-PACE, or distillation, over blocks of slots.

    One owner thread and one device: the chunk's buffers are kept between steps.

    Args:
        kind: `ce`, `dpace` or `kd`.
        chunk_slots: slots whose logits exist at one time; rounded down to whole blocks, at least one block.
        alpha: D-PACE's share of certainty. kd_weight: share of the distillation term, the rest is cross entropy.
    """

    def __init__(self, kind: str = "ce", chunk_slots: int = 2048, alpha: float = 0.5, kd_weight: float = 0.5) -> None:
        self.kind, self.chunk_slots, self.alpha, self.kd_weight = kind, chunk_slots, alpha, kd_weight
        self._workspace: Workspace | None = None

    @staticmethod
    def from_config(config: ObjectiveConfig) -> BlockObjective:
        return BlockObjective(config.kind, config.chunk_slots, config.dpace_alpha, config.kd_weight)

    @property
    def needs_teacher(self) -> bool:
        """Whether the target's last hidden states must travel with the batch."""
        return self.kind == "kd"

    def __call__(
        self,
        hidden: torch.Tensor,
        head: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        scale: float,
        teacher: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of a batch and its statistics.

        Args:
            hidden: `[batch, anchors, B-1, H]`, the drafter's normed states of slots 1..B-1.
            head: `[V, H]`, frozen.
            labels, weights: `[batch, anchors, B-1]` as in `Batch`; weight 0 means not supervised.
            scale: host float; 1 / the sum of weights over *all* drafters' batches of the step gives their mean.
            teacher: `[batch, anchors, B-1, H]`, for `kd`: the target's normed last hidden state at `anchor + k - 1`.

        Returns:
            The scaled loss, a float32 scalar whose gradient reaches `hidden`, and the float32 statistics vector
            (`StatLayout`), both on the device and never read here.
        """
        loss, stats = _ChunkedLoss.apply(hidden, head, labels, weights, scale, teacher, self)
        return loss, stats

    def _buffer(self, name: str, shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self._workspace is None:
            self._workspace = Workspace(like)
        return self._workspace.take(name, shape, dtype)

    def _logits(self, name: str, states: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """A chunk's logits in float32, in a kept buffer; multiplied in the states' own type."""
        shape = (states.shape[0], head.shape[0])
        logits = self._buffer(name, shape, states, torch.float32)
        if states.dtype == torch.float32:
            return torch.mm(states, head.t(), out=logits)
        return logits.copy_(torch.mm(states, head.t(), out=self._buffer("low", shape, states, states.dtype)))

    def _rounded(self, slope: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._buffer("low", slope.shape, slope, dtype).copy_(slope)

    def slot_weights(self, loss: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weights of a chunk's slots `[blocks, B-1]` given their cross entropies; no gradient passes through them.

        D-PACE (arXiv 2605.18810): with q = exp(-CE) and qs = (1-alpha) q + alpha, C_j the product of qs up to j, the weight of j
        is the sum of C_m over m >= j; an unsupervised slot is factor 1 in the product and 0 in the sum.
        """
        if self.kind != "dpace":
            return weights
        supervised = weights > 0
        certainty = (1.0 - self.alpha) * torch.exp(-loss) + self.alpha
        reach = torch.where(supervised, certainty, 1.0).cumprod(dim=1)
        reach = torch.where(supervised, reach, 0.0)
        tail = reach.flip(1).cumsum(dim=1).flip(1)
        return torch.where(supervised, tail, 0.0)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        scale: float,
        teacher: torch.Tensor | None,
        objective: BlockObjective,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        slots, size = hidden.shape[-2], hidden.shape[-1]
        states = hidden.reshape(-1, size)
        teacher = None if teacher is None else teacher.reshape(-1, size)
        labels, weights = labels.reshape(-1, slots), weights.reshape(-1, slots)
        blocks = labels.shape[0]
        step = min(max(1, objective.chunk_slots // slots), blocks)
        grad = torch.empty_like(states) if hidden.requires_grad else None
        stats = torch.zeros(StatLayout(slots).width, dtype=torch.float32, device=hidden.device)
        for first in range(0, blocks, step):
            rows = slice(first * slots, min(first + step, blocks) * slots)
            part = slice(first, first + step)
            stats += _chunk(
                objective,
                states[rows],
                head,
                labels[part],
                weights[part],
                scale,
                None if teacher is None else teacher[rows],
                None if grad is None else grad[rows],
            )
        if grad is not None:
            ctx.save_for_backward(grad)
        ctx.shape = hidden.shape
        ctx.mark_non_differentiable(stats)
        return stats[0] * scale, stats

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = ctx.saved_tensors
        return (grad * grads[0].to(grad.dtype)).view(ctx.shape), None, None, None, None, None, None


def _chunk(
    objective: BlockObjective,
    states: torch.Tensor,
    head: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
    teacher: torch.Tensor | None,
    grad: torch.Tensor | None,
) -> torch.Tensor:
    """Statistics of a few blocks, and their gradient written into `grad`."""
    flat = labels.reshape(-1, 1)
    logits = objective._logits("draft", states, head)
    best, guess = logits.max(dim=-1, keepdim=True)
    if objective.kind == "kd":
        if teacher is None:
            raise ValueError("kd needs the target's last hidden states")
        loss, slope, share = _distilled(logits, objective._logits("teacher", teacher, head), flat, objective.kd_weight)
    else:
        at_label = logits.gather(1, flat)
        slope = logits.sub_(best).exp_()
        total = slope.sum(dim=-1, keepdim=True)
        loss = total.log().add_(best).sub_(at_label)
        share = 1.0
    loss = loss.view_as(labels)
    weights = objective.slot_weights(loss, weights)
    if grad is not None:
        factor = (weights * scale).view(-1, 1)
        slope.mul_(factor if objective.kind == "kd" else factor / total)
        slope.scatter_add_(1, flat, factor * -share)
        torch.mm(slope if slope.dtype == head.dtype else objective._rounded(slope, head.dtype), head, out=grad)
    return _statistics(loss, weights, guess.view_as(labels) == labels)


def _distilled(
    logits: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, mix: float
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Of float32 logits `[rows, V]`, overwritten: the mixed loss `[rows, 1]`, its slope but for the label, the label's share.

    The slope of the mix in the draft's logits is p - mix * teacher's p - (1 - mix) at the label.
    """
    log_p, log_t = _log_softmax_(logits), _log_softmax_(teacher)
    cross_entropy = -log_p.gather(1, labels)
    pairs = zip(log_t.split(_SLICE), log_p.split(_SLICE), strict=True)
    divergence = torch.cat([(t.exp() * (t - p)).sum(dim=-1, keepdim=True) for t, p in pairs])
    loss = (1.0 - mix) * cross_entropy + mix * divergence
    return loss, log_p.exp_().sub_(log_t.exp_(), alpha=mix), 1.0 - mix


def _log_softmax_(logits: torch.Tensor) -> torch.Tensor:
    """In place, some rows at a time, so that no second tensor of this size exists."""
    logits.sub_(logits.amax(dim=-1, keepdim=True))
    total = torch.cat([part.exp().sum(dim=-1, keepdim=True) for part in logits.split(_SLICE)])
    return logits.sub_(total.log_())


def _statistics(loss: torch.Tensor, weights: torch.Tensor, correct: torch.Tensor) -> torch.Tensor:
    supervised = weights > 0
    run = (correct | ~supervised).cumprod(dim=1) * supervised
    counted = supervised.any(dim=1)
    heads = torch.stack([(loss * weights).sum(), weights.sum(), counted.sum(), run.sum() + counted.sum()])
    return torch.cat([heads, (correct & supervised).sum(dim=0), supervised.sum(dim=0)]).to(torch.float32)


def gather_teacher(last_hidden: torch.Tensor, anchors: torch.Tensor, block_size: int) -> torch.Tensor:
    """The target's states that predict the slots' tokens: `[batch, context, H]` -> `[batch, anchors, B-1, H]` at `a + k - 1`.

    Past the end of the context the last state stands in; such slots carry no weight.
    """
    batch, count = anchors.shape
    place = anchors[..., None] + torch.arange(block_size - 1, device=anchors.device)
    place = place.clamp_(max=last_hidden.shape[1] - 1).view(batch, -1, 1)
    picked = last_hidden.gather(1, place.expand(-1, -1, last_hidden.shape[-1]))
    return picked.view(batch, count, block_size - 1, -1)
