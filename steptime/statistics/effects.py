"""From pairs to what each switch costs: one estimator and one test for every question. Pure, log units.

A pair gives y, what its first half lost against its second, and a sign for each switch: +1 where it was on in
the first half alone, -1 in the second. The cost of a switch is the slope of y on its sign, once what the
other switches explain is taken off.

Its test draws the signs of that switch again, as the coins of `design` did, and leaves all else as it was.
Did it cost nothing, the signs drawn were as likely as any others, so the rank of what was found among the
redraws is uniform: whatever the noise, its drift and its autocorrelation, and whatever the others cost. The
bounds are the costs that this test would not refuse.

    T(s) = s'M y / sqrt(s'M s)          M takes off the other switches; s: signs, as drawn or as redrawn (s*)
    T(s*) >= T(s) of y - b s   <=>   b >= t* = (T(s) - T(s*)) / (sqrt(s'M s) - s'M s* / sqrt(s*'M s*))

The denominator is never negative (Cauchy and Schwarz), so the p of "it costs at most b" is the share of
redraws whose threshold t* lies at or below b, and a bound is a quantile of the thresholds.

M is a ridge, I - X (X'X + lambda I)^-1 X', with lambda by how much the others explain at all (Hoerl, Kennard
and Baldwin 1975: p s^2 / b'b). With a dozen pairs and cheap others it takes off next to nothing, where least
squares would spend half of the pairs on it; with a dear one among them it is least squares. The test is exact
for any M that does not look at the switch's own signs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from steptime.records.costs import Estimate, LayerCosts
from steptime.records.pairs import ALL, CONTROL, PLACEBO, Layer, Pair, Question
from steptime.records.types import log_ratio, slowdown_percent
from steptime.statistics.design import MIN_PAIRS

Floats = NDArray[np.float64]

ALPHA: Final = 0.05
"""Error of each one-sided bound. Stopping by the spread adds nothing to it, as redraws leave |y| alone."""
REDRAWS: Final = 1999
EXACT_UNITS: Final = 10
"""Up to so many pairs (launches) of a single layer every set of signs is tried."""
WIDEST: Final = 7.0
"""Bounds end here, at a thousandth of the throughput and at a thousand times as much: a dear switch among
eight pairs can leave another wholly open."""
MIN_RIDGE: Final = 0.1
"""Keeps M regular where a few pairs happen to have the same signs for two switches."""
MIN_LAUNCHES: Final = 7
"""Launches below which a gate says nothing: the smallest p is 2^-7."""
_STREAM: Final = 0x5EED
Z_BOTH: Final = 3.29
"""Standard errors between no cost and one that is found in 95 of 100 runs: 1.645 for the bound, as many
again for the power."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Pairs of one layer that were drawn for one question.

    Attributes:
        names: columns of `signs`.
        y: `[pairs]`, what the first half lost against the second, as a share of the time (log units).
        signs: `[pairs, names]`, +1 and -1.
        seconds_per: time between two ticks (flushes), by which seconds of them become a share; 0 in the path.
    """

    layer: Layer
    names: tuple[str, ...]
    y: Floats
    signs: Floats
    seconds_per: float = 0.0


@dataclass(frozen=True, slots=True)
class Redrawn:
    """A sample's statistics as drawn and as redrawn; row 0 is as drawn unless all sets of signs are there.

    Attributes:
        cost, error: `[names]`, estimates and their standard errors.
        weights: `[names]`, by which a statistic becomes a cost.
        found: `[names]`, T as drawn.
        redrawn, low, high: `[rows, names]`, T of each redraw, and its threshold as it counts for the lower
            and for the upper bound (they differ where a redraw cannot be told from what was drawn).
    """

    sample: Sample
    cost: Floats
    error: Floats
    weights: Floats
    found: Floats
    redrawn: Floats
    low: Floats
    high: Floats


def loss(pair: Pair, seconds_per: float = 0.0) -> float:
    """What the first half lost against the second: the log ratio of seconds per token in the path, else the
    seconds by which a forced tick (flush) took longer, over the seconds between two of them."""
    if pair.layer is Layer.PATH:
        first, second = pair.first, pair.second
        return float(np.log(first.seconds / first.tokens) - np.log(second.seconds / second.tokens))
    return (pair.first.seconds - pair.second.seconds) / seconds_per


def sample(
    pairs: Iterable[Pair],
    layer: Layer,
    question: Question,
    switches: Sequence[str],
    seconds_per: float = 0.0,
) -> Sample:
    """The pairs of one layer and question. Of pairs drawn for all together the columns are "all" and the
    placebo, else the switches, the placebo and the control."""
    chosen = [pair for pair in pairs if pair.layer is layer and pair.question is question]
    together = question is Question.TOGETHER
    extra = [PLACEBO, *_control_of(switches)]
    columns = [*([ALL] if together else switches), *extra]
    signs = [[pair.sign(switches[0] if name == ALL else name) for name in columns] for pair in chosen]
    table = np.array(signs, dtype=np.float64).reshape(len(chosen), len(columns))
    # A run without a placebo, or a layer without the control, has no such column.
    kept = [i for i in range(len(columns)) if i < len(columns) - len(extra) or table[:, i].any()]
    return Sample(
        layer,
        tuple(columns[i] for i in kept),
        np.array([loss(pair, seconds_per) for pair in chosen]),
        table[:, kept],
        seconds_per,
    )


def _control_of(switches: Sequence[str]) -> list[str]:
    """A user's own switch may have the control's name; such a run has no control."""
    return [] if CONTROL in switches else [CONTROL]


def launches(pairs: Iterable[Pair], switch: str, seconds_per: Mapping[Layer, float]) -> Sample:
    """A gate's launches, each as one unit: what the switch costs in it, the means of its layers added up. A
    launch that lacks a layer of `seconds_per` is left out.

    In a gate the whole commit is on in one half of a pair and off in the other, so a half with a forced tick
    holds what its steps cost too: that is taken off by what the path's pairs lose in each step.

    A launch's addresses and pages belong to all of its pairs, so these tell nothing of other launches."""
    found: dict[int, dict[Layer, list[Pair]]] = {}
    for pair in pairs:
        if pair.layer in seconds_per:
            found.setdefault(pair.process, {}).setdefault(pair.layer, []).append(pair)
    whole = [found[process] for process in sorted(found) if found[process].keys() == seconds_per.keys()]
    costs = np.array([_launch_cost(launch, switch, seconds_per) for launch in whole])
    return Sample(Layer.PATH, (switch,), costs, np.ones((len(costs), 1)))


def _launch_cost(
    launch: Mapping[Layer, Sequence[Pair]], switch: str, seconds_per: Mapping[Layer, float]
) -> float:
    path = launch[Layer.PATH]
    cost = float(np.mean([pair.sign(switch) * loss(pair) for pair in path]))
    step_s = float(np.mean([_seconds(pair, switch) / pair.first.steps for pair in path]))
    for layer, own in launch.items():
        if layer is not Layer.PATH:
            event_s = np.mean([_seconds(pair, switch) - pair.first.steps * step_s for pair in own])
            cost += float(event_s) / seconds_per[layer]
    return cost


def _seconds(pair: Pair, switch: str) -> float:
    """What the half with the switch on took longer."""
    return pair.sign(switch) * (pair.first.seconds - pair.second.seconds)


def redraw(sample: Sample, seed: int, *, exact: bool = False, rows: int = REDRAWS) -> Redrawn:
    """Draw the signs of every column anew, each with the others as they were.

    Args:
        exact: try every set of signs where there are at most EXACT_UNITS units.
    """
    y, signs = sample.y, sample.signs
    count, columns = signs.shape
    table = np.hstack([np.ones((count, 1)), signs])
    inverses = _ridge_inverses(table, y)
    cleared = y[:, None] - table @ (inverses @ (table.T @ y)).T
    own = signs - table @ np.einsum("ipq,qi->pi", inverses, table.T @ signs)
    size = np.sqrt(np.einsum("ni,ni->i", signs, own))
    found = np.einsum("ni,ni->i", signs, cleared) / size
    cost = found / size
    residual = cleared - own * cost
    # What the others explain of pure noise is no less of it in the cost.
    free = count - 1 - np.einsum("ipq,qp->i", inverses, table.T @ table)
    spread = np.einsum("ni,ni->i", residual, residual) / np.maximum(free, 1.0)
    drawn = _signs(count, seed, exact, rows)
    products = np.empty((len(drawn), 3 * columns + 1))
    for start in range(0, len(drawn), 256):
        batch = drawn[start : start + 256].astype(np.float64)
        products[start : start + 256] = batch @ np.hstack([cleared, own, table])
    x = products[:, 2 * columns :]
    lengths = np.sqrt(count - ((x @ inverses) * x).sum(axis=2)).T
    statistics = products[:, :columns] / lengths
    along = products[:, columns : 2 * columns] / lengths
    if not (exact and count <= EXACT_UNITS):
        statistics = np.vstack([found, statistics])
        along = np.vstack([size, along])
    denominators = size - along
    same = denominators <= 1e-9 * size
    with np.errstate(divide="ignore", invalid="ignore"):
        thresholds = (found - statistics) / denominators
    return Redrawn(
        sample,
        cost,
        np.sqrt(spread) / size,
        1.0 / size,
        found,
        statistics,
        np.where(same, -np.inf, thresholds),
        np.where(same, np.inf, thresholds),
    )


def _ridge_inverses(table: Floats, y: Floats) -> Floats:
    """`[names, 1 + names, 1 + names]`: for each column (X'X + lambda I)^-1 of what is taken off for it, zero
    elsewhere; lambda from what X explains of y.

    Taken off are the other columns and `table`'s first, of ones, which is the order inside a pair. One switch
    alone has no others, and the sign of a launch would be that column of ones."""
    count, size = table.shape
    inverses = np.zeros((size - 1, size, size))
    for i in range(size - 1 if size > 2 else 0):
        kept = np.array([k for k in range(size) if k != i + 1])
        x = table[:, kept]
        square, unit = x.T @ x, np.eye(size - 1)
        slopes = np.linalg.solve(square + MIN_RIDGE * unit, x.T @ y)
        variance = float(np.sum((y - x @ slopes) ** 2)) / max(count - size + 1, 2)
        explained = float(slopes @ slopes)
        ridge = max((size - 1) * variance / explained, MIN_RIDGE) if explained > 0 else MIN_RIDGE
        inverses[i][np.ix_(kept, kept)] = np.linalg.inv(square + ridge * unit)
    return inverses


def _signs(count: int, seed: int, exact: bool, rows: int) -> NDArray[np.int8]:
    """`[rows, count]` of +1 and -1: all of them if `exact` and few, else random ones."""
    if exact and count <= EXACT_UNITS:
        bits = (np.arange(2**count)[:, None] >> np.arange(count)) & 1
    else:
        # A stream of its own: the design's coins may come from the same seed.
        bits = np.random.default_rng([seed, _STREAM]).integers(0, 2, size=(rows, count), dtype=np.int8)
    return (1 - 2 * bits).astype(np.int8)


def total(parts: Sequence[Redrawn], name: str, budget_percent: float) -> Estimate:
    """The cost of one column, its layers added up.

    That it costs nothing in any layer is tested by redrawing all layers at once. For the bounds the
    thresholds of the layers are added row by row: they are independent, and how far each lies from its
    estimate is how far that layer may be wrong."""
    at = [part.sample.names.index(name) for part in parts]
    columns = list(zip(parts, at, strict=True))
    cost = sum(float(part.cost[i]) for part, i in columns)
    error = float(np.sqrt(sum(part.error[i] ** 2 for part, i in columns)))
    redrawn = np.sum([part.weights[i] * part.redrawn[:, i] for part, i in columns], axis=0)
    slack = 1e-12 * (abs(cost) + error)
    low = np.sort(np.sum([part.low[:, i] for part, i in columns], axis=0))
    high = -np.sort(-np.sum([part.high[:, i] for part, i in columns], axis=0))
    place = int(ALPHA * len(low) + 1e-9)
    budget = log_ratio(budget_percent)
    return Estimate(
        percent=slowdown_percent(cost),
        low=slowdown_percent(max(low[place], -WIDEST)),
        high=slowdown_percent(min(high[place], WIDEST)),
        standard_error=100.0 * error,
        mde=slowdown_percent(Z_BOTH * error),
        p_slower=float(np.mean(redrawn >= cost - slack)),
        p_faster=float(np.mean(redrawn <= cost + slack)),
        p_over=float(np.mean(low <= budget)),
        p_under=float(np.mean(high >= -budget)),
        n=sum(len(part.sample.y) for part in parts),
        layers=_layers(columns),
    )


def _layers(columns: Iterable[tuple[Redrawn, int]]) -> LayerCosts:
    found = LayerCosts()
    for part, i in columns:
        cost, milliseconds = float(part.cost[i]), 1e3 * part.sample.seconds_per
        if part.sample.layer is Layer.PATH:
            found = replace(found, path_percent=slowdown_percent(cost))
        elif part.sample.layer is Layer.TICK:
            found = replace(found, tick_ms=cost * milliseconds)
        else:
            found = replace(found, flush_ms=cost * milliseconds)
    return found


def estimates(
    pairs: Sequence[Pair],
    question: Question,
    switches: Sequence[str],
    seconds_per: Mapping[Layer, float],
    budgets_percent: Mapping[str, float],
    seed: int = 0,
    redraws: int = REDRAWS,
) -> dict[str, Estimate]:
    """What each switch (EACH) or all of them (TOGETHER) cost, and the placebo, over all layers; no control.

    Empty when a layer has fewer than MIN_PAIRS pairs of the question.

    Args:
        seconds_per: the layers that count, each with the seconds between two of its events (path: anything).
        budgets_percent: by name; the placebo's is that of a switch.
    """
    samples = [sample(pairs, layer, question, switches, seconds_per[layer]) for layer in seconds_per]
    if not samples or min(len(one.y) for one in samples) < MIN_PAIRS:
        return {}
    exact = len(samples) == 1
    parts = [redraw(one, 8 * seed + place, exact=exact, rows=redraws) for place, one in enumerate(samples)]
    asked = [name for name in samples[0].names if name in budgets_percent]
    return {name: total(parts, name, budgets_percent[name]) for name in asked}


def estimate_launches(
    pairs: Iterable[Pair],
    switch: str,
    seconds_per: Mapping[Layer, float],
    budget_percent: float,
    seed: int = 0,
) -> Estimate | None:
    """What a gate's switch costs, by flips of launches; None below MIN_LAUNCHES of them."""
    found = launches(pairs, switch, seconds_per)
    if len(found.y) < MIN_LAUNCHES:
        return None
    return total([redraw(found, seed, exact=True)], switch, budget_percent)


def launches_clear(
    pairs: Iterable[Pair], switch: str, seconds_per: Mapping[Layer, float], budget_percent: float
) -> bool:
    """Whether so many launches are enough: a head that costs nothing would be shown within the budget in 95
    of 100 gates of this spread. Looks at |y| alone, so looking costs no error."""
    y = launches(pairs, switch, seconds_per).y
    if len(y) < MIN_LAUNCHES:
        return False
    return Z_BOTH * float(np.sqrt(np.mean(y**2) / len(y))) <= log_ratio(budget_percent)


def least_squares(
    pairs: Sequence[Pair], switches: Sequence[str], seconds_per: Mapping[Layer, float]
) -> dict[str, tuple[float, float]]:
    """Cost and standard error, percent, of every switch and of "all" (their sum), from the pairs of both
    questions at once: the cross-check. It takes costs to add up, and noise of pairs to be independent.

    Empty when a layer has too few pairs for it."""
    controls = [name for name in _control_of(switches) if any(pair.sign(name) for pair in pairs)]
    columns = [*switches, PLACEBO, *controls]
    cost, square = np.zeros((2, len(columns) + 1))
    for layer, every in seconds_per.items():
        chosen = [pair for pair in pairs if pair.layer is layer]
        if len(chosen) < len(columns) + MIN_PAIRS:
            return {}
        table = np.array([[1.0, *map(pair.sign, columns)] for pair in chosen])
        y = np.array([loss(pair, every) for pair in chosen])
        inverse = np.linalg.pinv(table.T @ table)
        slopes = inverse @ (table.T @ y)
        variance = float(np.sum((y - table @ slopes) ** 2)) / (len(y) - table.shape[1])
        summed = np.zeros((len(columns) + 1, table.shape[1]))
        summed[:-1, 1:] = np.eye(len(columns))
        summed[-1, 1 : 1 + len(switches)] = 1.0
        cost += summed @ slopes
        square += variance * np.einsum("ap,pq,aq->a", summed, inverse, summed)
    return {
        name: (slowdown_percent(cost[i]), 100.0 * float(square[i]) ** 0.5)
        for i, name in enumerate([*columns, ALL])
        if name not in controls
    }
