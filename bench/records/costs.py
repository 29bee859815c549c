"""What a switch costs, with its bounds, as receipts keep it."""

from __future__ import annotations

from dataclasses import dataclass

from bench.records.types import STRICT


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """An estimate by layers. None: the layer was not measured.

    Attributes:
        path_percent: share of each step that is lost in the workers' path.
        tick_ms, flush_ms: time that each tick of the monitor, and each flush, takes from the workers.
    """

    __pydantic_config__ = STRICT

    path_percent: float | None = None
    tick_ms: float | None = None
    flush_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """A slowdown with its bounds, percent of the throughput. It is a mean: what a long run loses.

    Attributes:
        percent: path, ticks and flushes together.
        low, high: one-sided 95% bounds (together the two-sided 90% interval).
        standard_error: percent.
        mde: smallest slowdown that is found (low > 0) in 95 of 100 such runs.
        p_slower: p of "it costs nothing"; small: it costs something.
        p_faster: p of "it gains nothing".
        p_over: p of "it costs at most the budget"; small: it is over.
        p_under: p of "it gains at most the budget"; small: it gains more than that.
        n: pairs (in a gate: launches) that it rests on, all layers together.
    """

    __pydantic_config__ = STRICT

    percent: float
    low: float
    high: float
    standard_error: float
    mde: float
    p_slower: float
    p_faster: float
    p_over: float
    p_under: float
    n: int
    layers: LayerCosts = LayerCosts()
