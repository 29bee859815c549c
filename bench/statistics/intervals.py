"""Intervals: the slowdown of an arm with its one-sided bounds, and the p-values that verdicts are taken from.
Pure.

`contrasts` makes one number of each round, `estimates` a mean and its error of those. U < margin is
non-inferiority, with L > -margin equivalence (two one-sided tests, Schuirmann 1987)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

import numpy as np

from bench.records.types import Interval, Segment, log_ratio, slowdown_percent
from bench.statistics.contrasts import Floats, Rounds, rounds_of
from bench.statistics.estimates import Estimate, estimate_units, judging, p_of, t_quantile

ALPHA: Final = 0.05
"""Error that each one-sided bound keeps, whenever the stopping rule stops."""
NOMINAL: Final = 0.04
"""Error at which bounds are computed. Stopping on a spread that happens to be small adds up to a fifth (6.2%
for a nominal 5%, 5.0% for a nominal 4%: `python -m bench.selfcheck.simulate`), so this is what keeps
ALPHA."""
POWER: Final = 0.95
"""Share of runs in which a slowdown as large as the printed MDE is found."""
SWITCHED: Final = 0.01
"""Error at which the lower bound is taken when the checks for a cost on few steps or rounds make the plain
estimator judge: they choose it when it happens to be high, so at NOMINAL it would call identical code slower
too often."""
FLIPS: Final = 1999
EXACT_FLIPS: Final = 12
"""Up to so many units every sign pattern is tried."""


def interval(rounds: Rounds, ceiling: Rounds | None = None, alpha: float = NOMINAL) -> Interval | None:
    """The slowdown with its one-sided bounds, from at least two units.

    `ceiling`: contrast of the arms in which the collector is on together with others. Switching more on never
    makes training faster, so their mean cost is no less than this one's and their upper bound holds for it
    too. With it the upper bound is the lower of the two, each taken at half of alpha (Bonferroni), which
    keeps the error."""
    judge = judging(rounds)
    if judge is None:
        return None
    found = judge.estimate
    lower_alpha = min(alpha, SWITCHED) if judge.switched else alpha
    low, high = found.theta - found.bound(lower_alpha), found.theta + found.bound(alpha)
    top = None if ceiling is None else judging(ceiling)
    if top is not None:
        above = top.estimate
        high = min(found.theta + found.bound(alpha / 2), above.theta + above.bound(alpha / 2))
    return Interval(
        # Where the other arms bound the cost below its own estimate, the estimate goes down to the bound with
        # it.
        percent=slowdown_percent(min(found.theta, high)),
        low=slowdown_percent(low),
        high=slowdown_percent(high),
        mde=slowdown_percent(minimum_detectable(found, lower_alpha)),
        n=found.n,
        spread=100.0 * found.standard_error * found.n**0.5,
        estimator=judge.name,
        sign_flip_p=sign_flip(found.values),
        plain_percent=plain_percent(rounds),
        p_two_sided=2.0 * min(found.p_above(0.0), found.p_below(0.0)),
        ceiling_percent=None if ceiling is None or top is None else plain_percent(ceiling),
    )


def plain_percent(rounds: Rounds) -> float:
    """Slowdown of whole segments, percent."""
    found = estimate_units(rounds.plain, rounds.process)
    return slowdown_percent(float(rounds.plain.mean()) if found is None else found.theta)


def minimum_detectable(found: Estimate, alpha: float = NOMINAL, power: float = POWER) -> float:
    """Smallest theta found (L > 0) in `power` of runs with this spread and as many units: (t_alpha + t_beta)
    s / sqrt(n)."""
    return (t_quantile(1.0 - alpha, found.df) + t_quantile(power, found.df)) * found.standard_error


@lru_cache(maxsize=8)
def _signs(n: int, seed: int) -> Floats:
    if n <= EXACT_FLIPS:
        return 1.0 - 2.0 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1).astype(np.float64)
    return np.random.default_rng(seed).choice((-1.0, 1.0), size=(FLIPS, n))


def sign_flip(values: Floats, null: float = 0.0, seed: int = 0) -> float:
    """One-sided p of "the mean is at most `null`" when every sign of (value - null) was as likely; no
    normality needed.

    All 2^n patterns up to 12 units, else 1999 random ones from `seed`. The smallest p possible is 2^-n.
    """
    centred = values - null
    # Sums that are equal but for rounding count as reached.
    reached = centred.sum() - 1e-12 * np.abs(centred).sum()
    hits = int(np.count_nonzero(_signs(len(centred), seed) @ centred >= reached))
    return hits / 2 ** len(centred) if len(centred) <= EXACT_FLIPS else (hits + 1) / (FLIPS + 1)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p of each name: blame at the family's error needs p <= alpha. (To pass all, no
    adjustment is due.)"""
    adjusted: dict[str, float] = {}
    running = 0.0
    ranked = sorted(p_values.items(), key=lambda item: item[1])
    for place, (name, p) in enumerate(ranked):
        running = max(running, min(1.0, (len(ranked) - place) * p))
        adjusted[name] = running
    return adjusted


def throughput(
    segments: Iterable[Segment], arm: str, alpha: float = NOMINAL
) -> tuple[float, float, float] | None:
    """Tokens per second of an arm with one-sided bounds, from the mean log over rounds; None below two units.

    Holds for this session only: what changes between sessions is invisible from inside one.
    """
    rows = [
        (process, float(np.mean([np.log(s.tokens / s.seconds) for s in members if s.arm == arm])))
        for (process, _), members in rounds_of(segments).items()
        if any(s.arm == arm for s in members)
    ]
    found = estimate_units(
        np.array([value for _, value in rows]), np.array([p for p, _ in rows], dtype=np.int64)
    )
    if found is None:
        return None
    half = found.bound(alpha)
    centre, low, high = np.exp([found.theta, found.theta - half, found.theta + half])
    return float(centre), float(low), float(high)


def p_over(found: Interval, budget_percent: float) -> float:
    """p of "the slowdown is at most the budget", from a printed interval; small: it is over."""
    standard_error = found.spread / 100.0 / found.n**0.5
    return p_of(log_ratio(found.percent) - log_ratio(budget_percent), standard_error, found.n - 1)


def p_under(found: Interval, percent: float) -> float:
    """p of "the slowdown is at least `percent`", likewise; small: it is less."""
    return 1.0 - p_over(found, percent)
