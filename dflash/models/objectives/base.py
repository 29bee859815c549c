"""What the drafter minimises, computed chunk by chunk, so that the logits of one chunk are all that ever
exist.

The head is frozen, so the gradient with respect to the hidden states is known as soon as a chunk's logits
are: it is made in the forward pass, and the head is multiplied twice and not three times. Reference 1.6
(memory), 1.8 (losses, weights)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from dflash.config import ObjectiveConfig
from dflash.models.workspace import Workspace

STAT_NAMES = ("loss_sum", "weight_sum", "blocks", "accepted_sum")
"""Head of the statistics vector; per-slot correct (B-1) and per-slot supervised (B-1) counts follow."""


@dataclass(frozen=True, slots=True)
class StatLayout:
    """Places in the float32 statistics vector of a block size; sums over vectors are statistics of the union.

    loss_sum: weighted loss, unscaled. weight_sum: its denominator, the sum of the batch's own weights: the
    gradient is divided by it too, whatever weights an objective makes of them. blocks: those with a
    supervised slot. accepted_sum: over those blocks, leading correct slots plus the bonus token; an
    unsupervised slot neither ends nor lengthens the run."""

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


class SlotLoss(NamedTuple):
    """The loss of a chunk's slots, and how it changes with their logits.

    Attributes:
        loss: float32 `[rows, 1]`, unweighted.
        slope: float32 `[rows, V]`; `slope / total`, less `share` at the label, is the gradient in the logits.
        total: `[rows, 1]`; None stands for 1.
    """

    loss: torch.Tensor
    slope: torch.Tensor
    total: torch.Tensor | None = None
    share: float = 1.0


class BlockObjective:
    """A loss over blocks of slots. `name` and `slot_loss` make one, in a file of its own.

    One owner thread and one device: the chunk's buffers are kept between steps.

    Args:
        config: its settings; the defaults when left out. `chunk_slots` is rounded down to whole blocks (or
            one).
        softcap: logits become `softcap * tanh(logits / softcap)`, as the target's do; 0: they stay.

    Attributes:
        needs_teacher: the target's last hidden states must travel with the batch.
    """

    name: ClassVar[str]
    needs_teacher: ClassVar[bool] = False

    def __init__(self, config: ObjectiveConfig | None = None, softcap: float = 0.0) -> None:
        self.config = config or ObjectiveConfig()
        self.softcap = softcap
        self._workspace: Workspace | None = None

    def slot_loss(
        self,
        logits: torch.Tensor,
        best: torch.Tensor,
        labels: torch.Tensor,
        teacher: torch.Tensor | None,
    ) -> SlotLoss:
        """The loss of some rows.

        Args:
            logits: float32 `[rows, V]`, may be overwritten.
            best, labels: `[rows, 1]`: the largest logit, and the token that is right.
            teacher: the target's logits, likewise; None unless `needs_teacher`.
        """
        raise NotImplementedError

    def slot_weights(self, loss: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weights of a chunk's slots `[blocks, B-1]` given their losses; no gradient passes through them."""
        return weights

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
            scale: host float; 1 / the sum of weights over *all* drafters' batches of the step gives their
                mean.
            teacher: `[batch, anchors, B-1, H]`: the target's normed last hidden state at `anchor + k - 1`.

        Returns:
            The scaled loss, a float32 scalar whose gradient reaches `hidden`, and the float32 statistics
            vector (`StatLayout`), both on the device and never read here.

        Raises:
            ValueError: it needs a teacher, and there is none.
        """
        if self.needs_teacher and teacher is None:
            raise ValueError(f"{self.name} needs the target's last hidden states")
        if self._workspace is None:
            self._workspace = Workspace(hidden)
        loss, stats = _ChunkedLoss.apply(hidden, head, labels, weights, scale, teacher, self)
        self._workspace.checking = False
        return loss, stats

    def _buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        assert self._workspace is not None
        return self._workspace.take(name, shape, dtype)

    def _logits(self, name: str, states: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """A chunk's logits in float32, in a kept buffer; multiplied in the states' own type."""
        shape = (states.shape[0], head.shape[0])
        logits = self._buffer(name, shape, torch.float32)
        if states.dtype == torch.float32:
            return torch.mm(states, head.t(), out=logits)
        return logits.copy_(torch.mm(states, head.t(), out=self._buffer("low", shape, states.dtype)))

    def _cap(self, logits: torch.Tensor, name: str) -> torch.Tensor:
        """Cap the logits in place; returns how each changes with what it was, of their shape."""
        bend = self._buffer(name, logits.shape, torch.float32)
        torch.square(logits.div_(self.softcap).tanh_(), out=bend)
        logits.mul_(self.softcap)
        return bend.neg_().add_(1.0)

    def _rounded(self, slope: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._buffer("low", slope.shape, dtype).copy_(slope)


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
        step = min(max(1, objective.config.chunk_slots // slots), blocks)
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
    bend = objective._cap(logits, "bend") if objective.softcap else None
    best, guess = logits.max(dim=-1, keepdim=True)
    taught = None
    if objective.needs_teacher and teacher is not None:
        taught = objective._logits("teacher", teacher, head)
        if objective.softcap:
            objective._cap(taught, "teacher bend")
    loss, slope, total, share = objective.slot_loss(logits, best, flat, taught)
    loss = loss.view_as(labels)
    base, weights = weights, objective.slot_weights(loss, weights)
    if grad is not None:
        factor = (weights * scale).view(-1, 1)
        slope.mul_(factor if total is None else factor / total)
        slope.scatter_add_(1, flat, factor * -share)
        if bend is not None:
            slope.mul_(bend)
        torch.mm(
            slope if slope.dtype == head.dtype else objective._rounded(slope, head.dtype), head, out=grad
        )
    return _statistics(loss, weights, base, guess.view_as(labels) == labels)


def _statistics(
    loss: torch.Tensor, weights: torch.Tensor, base: torch.Tensor, correct: torch.Tensor
) -> torch.Tensor:
    supervised = base > 0
    run = (correct | ~supervised).cumprod(dim=1) * supervised
    counted = supervised.any(dim=1)
    heads = torch.stack([(loss * weights).sum(), base.sum(), counted.sum(), run.sum() + counted.sum()])
    return torch.cat([heads, (correct & supervised).sum(dim=0), supervised.sum(dim=0)]).to(torch.float32)


def gather_teacher(last_hidden: torch.Tensor, anchors: torch.Tensor, block_size: int) -> torch.Tensor:
    """The target's states that predict the slots' tokens: `[batch, context, H]` -> `[batch, anchors, B-1, H]`
    at `a + k - 1`.

    Past the end of the context the last state stands in; such slots carry no weight.
    """
    batch, count = anchors.shape
    place = anchors[..., None] + torch.arange(block_size - 1, device=anchors.device)
    place = place.clamp_(max=last_hidden.shape[1] - 1).view(batch, -1, 1)
    picked = last_hidden.gather(1, place.expand(-1, -1, last_hidden.shape[-1]))
    return picked.view(batch, count, block_size - 1, -1)
