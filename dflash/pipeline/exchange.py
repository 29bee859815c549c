"""Gradients of several drafters in one process, summed every step without a host wait on a device.

Each drafter owns one flat gradient buffer. A step is a reduce-scatter and an all-gather by hand: drafter r
sums shard r of everybody's buffer in the order of the drafters (so the sum does not depend on who comes
first), then everybody copies the summed shards. CUDA events order the streams; the threads meet on a host
barrier, which waits for *threads* to have enqueued their work, never for a device. Traffic per drafter is 2
(D-1)/D of the buffer, as in a ring."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

from dflash.device import Device


class ExchangeClosed(RuntimeError):
    """The run is stopping; no more gradients will be exchanged."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one drafter brings to a step, or all of them together.

    Attributes:
        weight: sum of the slot weights, the loss's denominator.
        tokens: real context tokens.
        stop: end the run after this step.
    """

    weight: float
    tokens: int
    stop: bool


class GradientExchange:
    """Meeting point of `drafters` worker threads; one object for the run.

    Three host values travel along, since everybody must agree on them: the weight (the loss is normalised
    over all drafters, so each gradient is that of a weighted *sum* and the denominators are added here), the
    tokens, and the wish to stop after this step."""

    def __init__(self, drafters: int) -> None:
        self.drafters = drafters
        self._barrier = threading.Barrier(drafters)
        self._flat: list[torch.Tensor | None] = [None] * drafters
        self._shares = [Share(0.0, 0, False)] * drafters
        self._backward_done: list[Any] = [None] * drafters
        self._reduced: list[Any] = [None] * drafters
        self._scratch: list[torch.Tensor | None] = [None] * drafters

    def join(self, drafter: int, flat_grad: torch.Tensor, device: Device) -> None:
        """Register a drafter's buffer `[parameters]`; waits for the others (once, before the first step)."""
        self._flat[drafter] = flat_grad
        self._backward_done[drafter] = device.event()
        self._reduced[drafter] = device.event()
        low, high = self._shard(drafter, flat_grad.numel())
        self._scratch[drafter] = torch.empty(high - low, dtype=flat_grad.dtype, device=flat_grad.device)
        self._meet()

    def sum(self, drafter: int, share: Share) -> Share:
        """Sum everybody's gradients into this drafter's buffer, in place. Returns the shares added up.

        Raises:
            ExchangeClosed: the run has failed.
        """
        if self.drafters == 1:
            return share
        own = self._flat[drafter]
        scratch = self._scratch[drafter]
        assert own is not None
        assert scratch is not None
        self._shares[drafter] = share
        self._backward_done[drafter].record()
        self._meet()
        shares = self._shares
        total = Share(
            sum(s.weight for s in shares), sum(s.tokens for s in shares), any(s.stop for s in shares)
        )
        # Behind these waits nobody reads our scratch any more either: that was before the others' backward.
        for done in self._backward_done:
            done.wait()
        low, high = self._shard(drafter, own.numel())
        for other, shard in enumerate(self._flat):
            assert shard is not None
            if other == 0:
                scratch.copy_(shard[low:high], non_blocking=True)
            else:
                scratch.add_(shard[low:high].to(own.device, non_blocking=True))
        self._reduced[drafter].record()
        self._meet()
        for other, part in enumerate(self._scratch):
            assert part is not None
            self._reduced[other].wait()
            low, high = self._shard(other, own.numel())
            own[low:high].copy_(part, non_blocking=True)
        return total

    def close(self) -> None:
        """Free every thread that waits."""
        self._barrier.abort()

    def _meet(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise ExchangeClosed from None

    def _shard(self, drafter: int, size: int) -> tuple[int, int]:
        share = -(-size // self.drafters)
        return min(drafter * share, size), min((drafter + 1) * share, size)
