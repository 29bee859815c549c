"""batch: what is in the batches, from host data, before anything moves to a device."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from operator import add, sub
from types import SimpleNamespace
from typing import Any, ClassVar

from dflash.observe.accounting import cost_ns
from dflash.observe.collectors.base import Collector, Sources
from dflash.observe.metric import Metric

_HOST = "counters of the prefetcher, from host data at collation"


@dataclass(frozen=True)
class _Counts:
    """The prefetcher's sums; `lengths` are counts by length bin."""

    batches: int
    tokens: int
    padded_tokens: int
    loss_tokens: int
    samples: int
    lengths: tuple[int, ...]

    def since(self, before: _Counts) -> _Counts:
        return _Counts(
            self.batches - before.batches,
            self.tokens - before.tokens,
            self.padded_tokens - before.padded_tokens,
            self.loss_tokens - before.loss_tokens,
            self.samples - before.samples,
            tuple(map(sub, self.lengths, before.lengths)),
        )


class BatchCollector(Collector):
    """What is in the batches, counted on the host before anything moves to a device.

    Takes deltas of the prefetcher's counters.
    """

    name = "batch"
    every_tick = False
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("batch/batches", "batches", "delta", "batches collated", _HOST),
        Metric("batch/tokens", "tokens", "delta", "real (non-padding) tokens", _HOST),
        Metric("batch/padded_tokens", "tokens", "delta", "tokens, padding included", _HOST),
        Metric(
            "batch/loss_token_fraction",
            "1",
            "ratio",
            "supervised share of the real tokens",
            _HOST,
            weight="batch/tokens",
        ),
        Metric(
            "batch/padding_efficiency",
            "1",
            "ratio",
            "real tokens over padded tokens",
            _HOST,
            weight="batch/padded_tokens",
        ),
        Metric("batch/size", "samples", "ratio", "samples in a batch", _HOST, weight="batch/batches"),
        Metric("batch/length_p50", "tokens", "instant", "median length of the samples", _HOST, "none"),
        Metric(
            "batch/length_p95",
            "tokens",
            "instant",
            "95% of the samples were at most this long",
            _HOST,
            "none",
        ),
    )

    def __init__(self, sources: Sources) -> None:
        super().__init__(sources)
        self._before: _Counts | None = None
        self._lengths: tuple[int, ...] = ()

    def throw(self, on: bool) -> None:
        if self.sources.prefetcher is not None:
            self.sources.prefetcher.counters.count = on

    def reset(self) -> None:
        self._before = None
        self._lengths = ()

    def sample(self, now_ns: int) -> dict[str, float]:
        prefetcher = self.sources.prefetcher
        if prefetcher is None:
            return {}
        now = _read(prefetcher.counters)
        before, self._before = self._before, now
        if before is None:
            return {}
        delta = now.since(before)
        if delta.samples:
            self._lengths = tuple(map(add, self._lengths, delta.lengths)) if self._lengths else delta.lengths
        return {**_values(delta), **_quantiles(delta.lengths, prefetcher.counters.bin_tokens)}

    def instruments(self) -> tuple[int, float]:
        if self.sources.prefetcher is None:
            return 0, 0.0
        counters = self.sources.prefetcher.counters
        if not counters.batches:
            return 0, 0.0
        lengths = (1,) * max(1, round(counters.samples / counters.batches))
        batch = SimpleNamespace(tokens=1, padded_tokens=1, loss_tokens=1, supervised_slots=1, lengths=lengths)
        probe = type(counters)()
        return counters.batches, cost_ns(lambda: probe.add(batch))

    def flush(self) -> dict[str, float]:
        lengths, self._lengths = self._lengths, ()
        return _quantiles(lengths, self.sources.prefetcher.counters.bin_tokens) if lengths else {}


def _read(counters: Any) -> _Counts:
    return _Counts(
        counters.batches,
        counters.tokens,
        counters.padded_tokens,
        counters.loss_tokens,
        counters.samples,
        tuple(counters.length_bins),
    )


def _values(delta: _Counts) -> dict[str, float]:
    values = {
        "batch/batches": float(delta.batches),
        "batch/tokens": float(delta.tokens),
        "batch/padded_tokens": float(delta.padded_tokens),
    }
    if delta.tokens > 0:
        values["batch/loss_token_fraction"] = delta.loss_tokens / delta.tokens
    if delta.padded_tokens > 0:
        values["batch/padding_efficiency"] = delta.tokens / delta.padded_tokens
    if delta.batches > 0:
        values["batch/size"] = delta.samples / delta.batches
    return values


def _quantiles(bins: tuple[int, ...], bin_tokens: int) -> dict[str, float]:
    """Nearest rank; bin i holds the lengths up to (i + 1) * bin_tokens. Empty when there are no samples."""
    total = sum(bins)
    if not total:
        return {}
    below = tuple(accumulate(bins))
    return {
        "batch/length_p50": float((bisect_left(below, 0.5 * total) + 1) * bin_tokens),
        "batch/length_p95": float((bisect_left(below, 0.95 * total) + 1) * bin_tokens),
    }
