"""What a switch costs, with its bounds, as receipts keep it."""

from __future__ import annotations

from dataclasses import dataclass

from steptime.records.types import STRICT, Verdict


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


@dataclass(frozen=True, slots=True)
class KnownCost:
    """The control of a run: what it lost beside what was measured of it.

    Attributes:
        percent: of the throughput, by the control's own clock.
        p_value: p of "it was measured as what it is, within a tenth", two-sided; small: it was not.
    """

    __pydantic_config__ = STRICT

    percent: float
    estimate: Estimate
    p_value: float


@dataclass(frozen=True, slots=True)
class SwitchCost:
    """What was said of one switch, or of all together (`name` = "all").

    Attributes:
        estimate: None: not measured.
        accounted_percent: what its own code and the monitor's work for it take of the step.
        added: kind -> count with it on less the count without; None where this machine cannot count the kind.
        minutes_to_settle: minutes of measuring, those spent included, after which such a run would show it
            within its budget if it costs nothing; None when there is nothing to settle.
    """

    __pydantic_config__ = STRICT

    name: str
    estimate: Estimate | None
    budget_percent: float
    verdict: Verdict
    reasons: tuple[str, ...] = ()
    accounted_percent: float | None = None
    added: dict[str, int | None] | None = None
    minutes_to_settle: float | None = None
