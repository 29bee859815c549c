"""How long to measure: the minutes that an answer needs on this machine, and when to stop. Pure.

Both look at the spread of |y| and never at its sign, which redraws of the signs leave alone: so looking costs
no error, however often it is done. The standard error of a cost after T seconds is

    sqrt(V / T),  V = sum over layers of (spread^2 x seconds of a pair / share of the pairs for the question)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

import numpy as np
from scipy.stats import norm

from steptime.records.pairs import CONTROL, Layer, Pair
from steptime.records.types import log_ratio
from steptime.statistics.design import MIN_PAIRS, SHARES, TOGETHER
from steptime.statistics.effects import ALPHA, loss

POWER: Final = 0.95
"""Share of runs that show a free switch within its budget after the minutes that are printed."""
MIN_PILOT: Final = 8
"""Pairs from which a spread is taken."""


def z_both(power: float = POWER) -> float:
    """Standard errors between no cost and a budget that is shown to be kept in `power` of the runs."""
    return float(norm.ppf(1.0 - ALPHA) + norm.ppf(power))


def spreads(pairs: Sequence[Pair], seconds_per: Mapping[Layer, float]) -> dict[Layer, float]:
    """Root mean square of y of each layer, log units; a layer below MIN_PILOT pairs is left out.
    Pairs with the control, whose cost is no noise, do not count."""
    found: dict[Layer, float] = {}
    for layer, every in seconds_per.items():
        losses = np.array(
            [loss(pair, every) for pair in pairs if pair.layer is layer and not pair.sign(CONTROL)]
        )
        if len(losses) >= MIN_PILOT:
            found[layer] = float(np.sqrt(np.mean(losses**2)))
    return found


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run on this machine can show.

    Attributes:
        variance_s: V above, of the cost of all together.
        budget_percent: of all together.
    """

    variance_s: float
    budget_percent: float

    def standard_error_percent(self, minutes: float) -> float:
        return 100.0 * float(np.sqrt(self.variance_s / (60.0 * minutes)))

    def minutes(self, power: float = POWER) -> float:
        """Minutes of pairs after which all together are shown within their budget in `power` of the runs, if
        they cost nothing."""
        return self.variance_s * (z_both(power) / log_ratio(self.budget_percent)) ** 2 / 60.0

    def power(self, minutes: float) -> float:
        """Share of runs of so many minutes that show it."""
        error = float(np.sqrt(self.variance_s / (60.0 * minutes)))
        return float(norm.cdf(log_ratio(self.budget_percent) / error - norm.ppf(1.0 - ALPHA)))


def plan(
    spread: Mapping[Layer, float],
    lengths_s: Mapping[Layer, float],
    budget_percent: float,
    *,
    shares: Mapping[Layer, float] = SHARES,
    together: float = TOGETHER,
) -> Plan:
    """What this machine's spread and lengths of pairs make possible.

    A layer of `lengths_s` whose spread is not known yet is taken to spread as the path does.

    Args:
        spread: as `spreads` gives it.
        lengths_s: seconds that a pair of each layer takes, both halves with what lies between.
        together: share of the pairs drawn for all together; 1 where there is a single switch.
    """
    whole = sum(shares[layer] for layer in lengths_s)
    widest = max(spread.values(), default=inf)
    variance = sum(
        spread.get(layer, widest) ** 2 * length / (shares[layer] / whole * together)
        for layer, length in lengths_s.items()
    )
    return Plan(variance, budget_percent)


@dataclass(frozen=True, slots=True)
class Decision:
    """Stop or go on.

    Attributes:
        why: "clear" (precise enough), "time", or "" while going on.
        minutes: of pairs that the answer would take in all, as it looks now; infinite while too few pairs
            tell.
    """

    stop: bool
    why: str
    minutes: float = inf


def decide(
    y: Mapping[Layer, Sequence[float]],
    layers: Sequence[Layer],
    budget_percent: float,
    spent_s: float,
    *,
    out_of_time: bool,
    least: int = MIN_PAIRS,
    power: float = POWER,
) -> Decision:
    """Whether the pairs drawn for all together are enough: would a free run be shown within its budget in 95
    of 100 runs of this spread and as many pairs?

    Args:
        y: `loss` of each such pair, by layer.
        layers: those that must have at least `least` pairs.
        spent_s: seconds that pairs took so far.
    """
    if any(len(y.get(layer, ())) < least for layer in layers) or not layers:
        return Decision(out_of_time, "time" if out_of_time else "")
    square = sum(float(np.mean(np.square(y[layer]))) / len(y[layer]) for layer in layers)
    minutes = spent_s / 60.0 * square * (z_both(power) / log_ratio(budget_percent)) ** 2
    if minutes <= spent_s / 60.0:
        return Decision(True, "clear", minutes)
    return Decision(out_of_time, "time" if out_of_time else "", minutes)


def minutes_to_settle(standard_error_percent: float, budget_percent: float, minutes: float) -> float:
    """Minutes in all after which a cost of nothing would be shown within its budget, from the standard error
    that `minutes` gave."""
    return minutes * (z_both() * standard_error_percent / (100.0 * log_ratio(budget_percent))) ** 2
