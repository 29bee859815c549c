"""Gradients of several drafters in one process, summed every step without a host wait on a device.

Each drafter owns one flat gradient buffer. A step is a reduce-scatter and an all-gather by hand: drafter r
sums shard r of everybody's buffer in the order of the drafters (so the sum does not depend on who comes
first), then everybody copies the summed shards. CUDA events order the streams; the threads meet on a host
barrier, which waits for *threads* to have enqueued their work, never for a device. Traffic per drafter is 2
(D-1)/D of the buffer, as in a ring."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from dflash.device import Device
from dflash.ranks.across import Across, RanksClosed, Share, total


class ExchangeClosed(RuntimeError):
    """The run is stopping; no more gradients will be exchanged."""


class GradientExchange:
    """Meeting point of `drafters` worker threads; one object for the run.

    Three host values travel along, since everybody must agree on them: the weight (the loss is normalised
    over all drafters, so each gradient is that of a weighted *sum* and the denominators are added here), the
    tokens, and the wish to stop after this step.

    Args:
        across: the other ranks of the run. Drafter d then adds its shard, summed here, to the shards of the
            d-th drafters of all ranks; drafter 0 agrees with the other ranks for all drafters of this one.
    """

    def __init__(self, drafters: int, across: Across | None = None) -> None:
        self.drafters, self._across = drafters, across
        self._total = Share(0.0, 0, False)
        self._parts: list[tuple[int, int]] | None = None
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
            if self._across is None:
                return share
            try:
                return self._with_others(self._across, share)
            except RanksClosed:
                raise ExchangeClosed from None
        own = self._flat[drafter]
        scratch = self._scratch[drafter]
        assert own is not None
        assert scratch is not None
        self._shares[drafter] = share
        self._backward_done[drafter].record()
        self._meet()
        together = total(self._shares) if self._across is None else self._agreed(self._across, drafter)
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
        if self._across is not None:
            self._added(self._across, drafter, scratch)
        self._reduced[drafter].record()
        self._meet()
        for other, part in enumerate(self._scratch):
            assert part is not None
            self._reduced[other].wait()
            low, high = self._shard(other, own.numel())
            own[low:high].copy_(part, non_blocking=True)
        return together

    @property
    def overlaps(self) -> bool:
        """Whether parts of the gradient may be summed while the backward goes on: there are other ranks, and
        one drafter in each."""
        return self._across is not None and self.drafters == 1

    def announce(self, share: Share) -> None:
        """Agree on the step before its last backward, so that `part` may follow; `sum` then ends what they
        began. Where it `overlaps`.

        Raises:
            ExchangeClosed: the run has failed.
        """
        assert self._across is not None
        self._agreed(self._across, 0, (share,))
        self._parts = []

    def part(self, low: int, high: int) -> None:
        """These elements of the gradient are complete. Called in the backward; waits for nobody.

        Raises:
            as `announce`.
        """
        across, own, parts = self._across, self._flat[0], self._parts
        assert across is not None
        assert own is not None
        assert parts is not None
        try:
            across.begin(0, own[low:high])
        except RanksClosed:
            raise ExchangeClosed from None
        parts.append((low, high))

    def close(self) -> None:
        """Free every thread that waits."""
        self._barrier.abort()
        if self._across is not None:
            self._across.close()

    def _with_others(self, across: Across, share: Share) -> Share:
        """One drafter in each rank."""
        own = self._flat[0]
        assert own is not None
        if self._parts is None:
            self.announce(share)
        parts, self._parts = sorted(self._parts or ()), None
        gaps = zip([0, *(high for _, high in parts)], [*(low for low, _ in parts), own.numel()], strict=True)
        for low, high in gaps:
            if low < high:
                across.begin(0, own[low:high])
        across.finish()
        return self._total

    def _agreed(self, across: Across, drafter: int, shares: Sequence[Share] = ()) -> Share:
        """Every rank is in this step: the shares of all drafters of all ranks."""
        if drafter == 0:
            try:
                self._total = across.agree(total(shares or self._shares))
            except RanksClosed:
                raise ExchangeClosed from None
        if self.drafters > 1:
            self._meet()
        return self._total

    def _added(self, across: Across, drafter: int, part: torch.Tensor) -> None:
        try:
            across.add(drafter, part)
        except RanksClosed:
            raise ExchangeClosed from None

    def _meet(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise ExchangeClosed from None

    def _shard(self, drafter: int, size: int) -> tuple[int, int]:
        share = -(-size // self.drafters)
        return min(drafter * share, size), min((drafter + 1) * share, size)
