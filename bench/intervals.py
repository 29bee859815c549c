"""Pure statistics: differences of log seconds-per-token in, intervals out.

theta is ln(seconds per token, arm) - ln(seconds per token, control), measured inside a round, where the machine was the same
for both as nearly as it ever is. Two estimators of a round's theta:

- *plain*: whole segments, ln(seconds / tokens). What a user feels, and as noisy as the machine.
- *step*: both arms replay the same batches, so step i of one pairs with step i of the other; the midmean (mean of the middle
  half, weighted by how long each batch takes) of the paired log differences. A stall of the machine falls on few steps and
  is trimmed. A cost that falls on few steps would be trimmed too, so `choose` lets this one judge only where it is much the
  sharper, and not when `tail_excess` sees such a cost.

Rounds are the units of a t interval; with several processes the process is (Kalibera and Jones 2013, see `estimate_units`).
One-sided 95% bounds: U < margin is non-inferiority, with L > -margin equivalence (two one-sided tests, Schuirmann 1987).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import special

from bench.records import Interval, Segment, log_ratio, slowdown_percent

Floats = NDArray[np.float64]

ALPHA: Final = 0.05
"""Error that each one-sided bound keeps, whenever the stopping rule stops."""
NOMINAL: Final = 0.04
"""Error at which bounds are computed. Stopping on a spread that happens to be small adds up to a fifth (6.2% for a nominal 5%,
5.0% for a nominal 4%: `python -m bench.simulate`), so this is what keeps ALPHA."""
POWER: Final = 0.95
"""Share of runs in which a slowdown as large as the printed MDE is found."""
TRIM: Final = 0.25
"""Weight cut from each end of the paired step differences."""
SHARPER: Final = 0.8
"""The step estimator judges only where its rounds spread by less than this share of what whole segments do. Where it gains
less it would trim part of a cost away for nothing. A choice by spread alone says nothing of the effect: it costs no error."""
TAIL_ALPHA: Final = 0.05
"""Error of each of the two checks for a cost that falls on few steps."""
SWITCHED: Final = 0.01
"""Error at which the lower bound is taken when those checks make the plain estimator judge: they choose it when it happens to be
high, so at NOMINAL it would call identical code slower too often."""
TAIL_WIDTH: Final = 3.0
"""Robust standard deviations beyond which a paired step counts as slow (or fast)."""
FLIPS: Final = 1999
EXACT_FLIPS: Final = 12
"""Up to so many units every sign pattern is tried."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Contrast of every whole round. Arrays `[rounds]`, log units.

    Attributes:
        process: which process the round belongs to.
        plain: contrast of whole segments.
        step: midmean contrast of paired steps; empty when steps were not timed.
        tail: share of the time in steps far slower than their partner less the share far faster; empty likewise.
    """

    process: NDArray[np.int64]
    plain: Floats
    step: Floats
    tail: Floats

    def __len__(self) -> int:
        return len(self.plain)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over units with what its interval needs; log units."""

    theta: float
    standard_error: float
    df: int
    values: Floats

    @property
    def n(self) -> int:
        return self.df + 1

    def bound(self, alpha: float) -> float:
        """Half-width of the one-sided bound of error `alpha`."""
        return _t(1.0 - alpha, self.df) * self.standard_error

    def p_above(self, null: float) -> float:
        """p of "theta <= null"; small: theta is above."""
        return _p(self.theta - null, self.standard_error, self.df)

    def p_below(self, null: float) -> float:
        """p of "theta >= null"; small: non-inferior with margin `null`."""
        return _p(null - self.theta, self.standard_error, self.df)


def _t(quantile: float, df: int) -> float:
    # scipy.special is 50 times faster than scipy.stats here, and looks are taken while the pipeline runs.
    return float(special.stdtrit(df, quantile))


def _p(distance: float, standard_error: float, df: int) -> float:
    if standard_error == 0.0:
        return 0.0 if distance > 0 else 1.0 if distance < 0 else 0.5
    return float(special.stdtr(df, -distance / standard_error))


def midmean(values: Floats, weights: Floats, trim: float = TRIM) -> Floats:
    """Weighted mean of what is left of `values` `[..., k]` after `trim` of the weight is cut from each end.

    `weights` `[k]` or like `values`, positive. A value on the edge keeps the part of its weight that is inside. Returns `[...]`.
    """
    weights = np.broadcast_to(weights, values.shape)
    order = np.argsort(values, axis=-1)
    ranked = np.take_along_axis(values, order, axis=-1)
    upper = np.cumsum(np.take_along_axis(weights, order, axis=-1), axis=-1)
    total = upper[..., -1:]
    upper = upper / total
    lower = np.concatenate([np.zeros_like(upper[..., :1]), upper[..., :-1]], axis=-1)
    kept = np.clip(np.minimum(upper, 1.0 - trim) - np.maximum(lower, trim), 0.0, None)
    result: Floats = (ranked * kept).sum(axis=-1) / kept.sum(axis=-1)
    return result


def tail_excess(differences: Floats, weights: Floats, centre: Floats) -> Floats:
    """Weight share of `differences` `[..., k]` far above `centre` `[...]` less the share far below.

    Under exchangeable noise both tails of a paired difference are alike, so the expectation is 0 whatever the machine does.
    """
    weights = np.broadcast_to(weights, differences.shape)
    away = differences - centre[..., None]
    width = TAIL_WIDTH * 1.4826 * np.median(np.abs(away), axis=-1, keepdims=True)
    far = np.where(np.abs(away) > width, np.sign(away), 0.0)
    result: Floats = (far * weights).sum(axis=-1) / weights.sum(axis=-1)
    return result


def by_phase(segment: Segment, cycle: int) -> dict[tuple[int, int], float]:
    """Seconds of each step under (place in the cycle, how often that place came before in this segment)."""
    return {((segment.phase + i) % cycle, i // cycle): s for i, s in enumerate(segment.step_seconds)}


def rounds_of(segments: Iterable[Segment]) -> dict[tuple[int, int], list[Segment]]:
    """Segments under (process, round), in the order taken."""
    groups: dict[tuple[int, int], list[Segment]] = {}
    for segment in segments:
        groups.setdefault((segment.process, segment.round), []).append(segment)
    return groups


def contrast_of_round(
    members: Sequence[Segment], arms: Sequence[str], controls: Sequence[str], cycle: int
) -> tuple[float, float, float] | None:
    """(plain, step, tail) of one round: mean of `arms` against mean of `controls`; None when an arm is missing.

    step and tail are NaN unless every segment timed its steps and pairs have at least half of their steps in common.
    """
    present = {segment.arm for segment in members}
    if not present.issuperset(arms) or not present.issuperset(controls):
        return None
    treated = [segment for segment in members if segment.arm in arms]
    control = [segment for segment in members if segment.arm in controls]
    plain = _mean_log(treated, arms) - _mean_log(control, controls)
    step, tail = _paired(members, treated, control, cycle)
    return plain, step, tail


def _mean_log(segments: Sequence[Segment], arms: Sequence[str]) -> float:
    """Mean over arms (each counted once, however often it was measured) of ln(seconds per token)."""
    logs = [np.mean([np.log(s.seconds / s.tokens) for s in segments if s.arm == arm]) for arm in dict.fromkeys(arms)]
    return float(np.mean(logs))


def _paired(
    members: Sequence[Segment], treated: Sequence[Segment], control: Sequence[Segment], cycle: int
) -> tuple[float, float]:
    steps = {id(s): by_phase(s, cycle) for s in members if s.step_seconds}
    if any(id(s) not in steps for s in (*treated, *control)):
        return np.nan, np.nan
    shortest: dict[tuple[int, int], float] = {}
    for timed in steps.values():
        for key, seconds in timed.items():
            shortest[key] = min(seconds, shortest.get(key, seconds))
    per_arm: dict[str, list[tuple[float, float]]] = {}
    for one in treated:
        for other in control:
            a, b = steps[id(one)], steps[id(other)]
            common = [key for key in a if key in b]
            if 2 * len(common) < max(len(a), len(b)):
                return np.nan, np.nan
            differences = np.array([np.log(a[key] / b[key]) for key in common])
            weights = np.array([shortest[key] for key in common])
            centre = midmean(differences, weights)
            per_arm.setdefault(one.arm, []).append((float(centre), float(tail_excess(differences, weights, centre))))
    means = np.array([np.mean(pairs, axis=0) for pairs in per_arm.values()])
    step, tail = means.mean(axis=0)
    return float(step), float(tail)


def collect(rows: Iterable[tuple[int, tuple[float, float, float]]]) -> Rounds:
    """(process, contrast of a round) pairs as arrays; the step estimator only when every round has it."""
    rows = list(rows)
    process = np.array([p for p, _ in rows], dtype=np.int64)
    values = np.array([row for _, row in rows], dtype=np.float64).reshape(len(rows), 3)
    timed = len(rows) > 0 and bool(np.isfinite(values[:, 1:]).all())
    none = np.empty(0)
    return Rounds(process, values[:, 0], values[:, 1] if timed else none, values[:, 2] if timed else none)


def contrasts(segments: Iterable[Segment], arms: Sequence[str], controls: Sequence[str], cycle: int) -> Rounds:
    """The contrast of every round that holds all of `arms` and `controls`."""
    found = []
    for (process, _), members in rounds_of(segments).items():
        row = contrast_of_round(members, arms, controls, cycle)
        if row is not None:
            found.append((process, row))
    return collect(found)


def units(values: Floats, process: NDArray[np.int64]) -> Floats:
    """The independent units: rounds of one process, or the mean of each process when there are several."""
    names = np.unique(process)
    if len(names) < 2:
        return values
    return np.array([values[process == name].mean() for name in names])


def estimate_units(values: Floats, process: NDArray[np.int64]) -> Estimate | None:
    """The mean over processes with its standard error; over the rounds when there is one process.

    The process is the unit. Only when three or more processes spread no more than their own rounds account for are the rounds
    taken instead: their standard error is then the larger one, and has more degrees of freedom. The error stays within ALPHA
    whatever the spread between processes (tested), and intervals of few launches get a third narrower where there is none.
    """
    groups = [values[process == name] for name in np.unique(process)]
    if len(groups) < 2:
        return estimate(values)
    between = estimate(units(values, process))
    assert between is not None
    if len(groups) < 3 or min(len(group) for group in groups) < 2:
        return between
    within = float(np.sqrt(sum(group.var(ddof=1) / len(group) for group in groups))) / len(groups)
    if between.standard_error > within:
        return between
    return Estimate(between.theta, within, len(values) - len(groups), values)


def estimate(values: Floats) -> Estimate | None:
    """Mean of at least two units with its standard error; None for fewer (nothing can be said)."""
    n = len(values)
    if n < 2:
        return None
    return Estimate(float(values.mean()), float(values.std(ddof=1)) / n**0.5, n - 1, values)


def falls_on_few_steps(rounds: Rounds) -> bool:
    """True when one arm has more slow steps than the other, or whole segments lose more than their middle steps.

    Then the step estimator, which trims slow steps, would hide a cost. Each of the two checks errs in 1 of 20 runs, towards
    the plain estimator, which is honest and merely wider.
    """
    if not len(rounds.step):
        return False
    for values in (rounds.tail, rounds.plain - rounds.step):
        found = estimate_units(values, rounds.process)
        if found is not None and found.p_above(0.0) < TAIL_ALPHA:
            return True
    return False


def step_is_sharper(rounds: Rounds) -> bool:
    """Steps were timed, and rounds spread much less in them than as a whole."""
    return len(rounds.step) > 1 and _spread(rounds.step, rounds.process) < SHARPER * _spread(rounds.plain, rounds.process)


def _spread(values: Floats, process: NDArray[np.int64]) -> float:
    """Spread of rounds about the mean of their process, in units that only compare."""
    names = np.unique(process)
    return float(np.sqrt(sum(((values[process == name] - values[process == name].mean()) ** 2).sum() for name in names)))


def choose(rounds: Rounds) -> tuple[str, Floats]:
    """The estimator that judges, by name, and its values: step where it is much sharper and the tails are alike."""
    if step_is_sharper(rounds) and not falls_on_few_steps(rounds):
        return "step", rounds.step
    return "plain", rounds.plain


def interval(rounds: Rounds, ceiling: Rounds | None = None, alpha: float = NOMINAL) -> Interval | None:
    """The slowdown with its one-sided bounds, from at least two units.

    `ceiling`: contrast of the arms in which the collector is on together with others. Switching more on never makes training
    faster, so their mean cost is no less than this one's and their upper bound holds for it too. With it the upper bound is
    the lower of the two, each taken at half of alpha (Bonferroni), which keeps the error.
    """
    name, values = choose(rounds)
    found = estimate_units(values, rounds.process)
    if found is None:
        return None
    lower_alpha = min(alpha, SWITCHED) if name == "plain" and step_is_sharper(rounds) else alpha
    low, high = found.theta - found.bound(lower_alpha), found.theta + found.bound(alpha)
    above = None if ceiling is None else estimate_units(choose(ceiling)[1], ceiling.process)
    if above is not None:
        high = min(found.theta + found.bound(alpha / 2), above.theta + above.bound(alpha / 2))
    return Interval(
        # Where the other arms bound the cost below its own estimate, the estimate goes down to the bound with it.
        percent=slowdown_percent(min(found.theta, high)),
        low=slowdown_percent(low),
        high=slowdown_percent(high),
        mde=slowdown_percent(minimum_detectable(found, lower_alpha)),
        n=found.n,
        spread=100.0 * found.standard_error * found.n**0.5,
        estimator=name,
        sign_flip_p=sign_flip(found.values),
        plain_percent=plain_percent(rounds),
        p_two_sided=2.0 * min(found.p_above(0.0), found.p_below(0.0)),
        ceiling_percent=None if ceiling is None or above is None else plain_percent(ceiling),
    )


def plain_percent(rounds: Rounds) -> float:
    """Slowdown of whole segments, percent."""
    return slowdown_percent(float(units(rounds.plain, rounds.process).mean()))


def minimum_detectable(found: Estimate, alpha: float = NOMINAL, power: float = POWER) -> float:
    """Smallest theta found (L > 0) in `power` of runs with this spread and as many units: (t_alpha + t_beta) s / sqrt(n)."""
    return (_t(1.0 - alpha, found.df) + _t(power, found.df)) * found.standard_error


@lru_cache(maxsize=8)
def _signs(n: int, seed: int) -> Floats:
    if n <= EXACT_FLIPS:
        return 1.0 - 2.0 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1).astype(np.float64)
    return np.random.default_rng(seed).choice((-1.0, 1.0), size=(FLIPS, n))


def sign_flip(values: Floats, null: float = 0.0, seed: int = 0) -> float:
    """One-sided p of "the mean is at most `null`" when every sign of (value - null) was as likely; no normality needed.

    All 2^n patterns up to 12 units, else 1999 random ones from `seed`. The smallest p possible is 2^-n.
    """
    centred = values - null
    # Sums that are equal but for rounding count as reached.
    reached = centred.sum() - 1e-12 * np.abs(centred).sum()
    hits = int(np.count_nonzero(_signs(len(centred), seed) @ centred >= reached))
    return hits / 2 ** len(centred) if len(centred) <= EXACT_FLIPS else (hits + 1) / (FLIPS + 1)


def equivalence_p(found: Estimate, margin: float) -> float:
    """p of the two one-sided tests of "|theta| >= margin" (log units)."""
    return max(found.p_above(-margin), found.p_below(margin))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p of each name: blame at the family's error needs p <= alpha. (To pass all, no adjustment is due.)"""
    adjusted: dict[str, float] = {}
    running = 0.0
    ranked = sorted(p_values.items(), key=lambda item: item[1])
    for place, (name, p) in enumerate(ranked):
        running = max(running, min(1.0, (len(ranked) - place) * p))
        adjusted[name] = running
    return adjusted


def throughput(segments: Iterable[Segment], arm: str, alpha: float = NOMINAL) -> tuple[float, float, float] | None:
    """Tokens per second of an arm with one-sided bounds, from the mean log over rounds; None below two units.

    Holds for this session only: what changes between sessions is invisible from inside one.
    """
    rows = [
        (process, float(np.mean([np.log(s.tokens / s.seconds) for s in members if s.arm == arm])))
        for (process, _), members in rounds_of(segments).items()
        if any(s.arm == arm for s in members)
    ]
    found = estimate_units(np.array([value for _, value in rows]), np.array([p for p, _ in rows], dtype=np.int64))
    if found is None:
        return None
    half = found.bound(alpha)
    centre, low, high = np.exp([found.theta, found.theta - half, found.theta + half])
    return float(centre), float(low), float(high)


def p_over(found: Interval, budget_percent: float) -> float:
    """p of "the slowdown is at most the budget", from a printed interval; small: it is over."""
    standard_error = found.spread / 100.0 / found.n**0.5
    return _p(log_ratio(found.percent) - log_ratio(budget_percent), standard_error, found.n - 1)


def p_under(found: Interval, percent: float) -> float:
    """p of "the slowdown is at least `percent`", likewise; small: it is less."""
    return 1.0 - p_over(found, percent)
