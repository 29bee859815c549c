"""From the contrasts of rounds to a mean with its error, and which estimator is let to judge. Pure; log
units.

- *plain*: the mean over rounds of whole segments. Blind to nothing.
- *middle*: the mean of the middle half of those rounds. On a shared machine the noise of rounds has heavy
  tails (a round in which others took the core), and this is a quarter sharper there: as good as 1.8 times the
  rounds.
- *step*: the mean over rounds of the midmean of paired steps (see `contrasts`).

The latter two trim what falls on few rounds or steps, and a cost that falls there would be trimmed too. So
each judges only where it is clearly sharper than plain, and not where one of two checks sees such a cost.

Rounds are the units of a t interval; with several processes the process is (Kalibera and Jones 2013, see
`combine`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from bench.statistics.contrasts import TAIL_WIDTH, Floats, Rounds

SHARPER: Final = 0.8
"""The step estimator judges only where its rounds spread by less than this share of what whole segments do.
Where it gains less it would trim part of a cost away for nothing. A choice by spread alone says nothing of
the effect: it costs no error."""
MIDDLE_SHARPER: Final = 0.9
"""The same of the middle half's standard error. Under normal noise it is 1.09 times plain's."""
MIDDLE_ROUNDS: Final = 40
"""Rounds in all that the middle half needs: of fewer it leaves too few degrees of freedom to gain
anything."""
MIDDLE_OF_PROCESS: Final = 16
"""Rounds of each process that it needs."""
CUT: Final = 0.25
"""Share of the rounds cut from each end."""
TAIL_ALPHA: Final = 0.05
"""Error of each of the checks for a cost that falls on few steps, or on few rounds."""


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
        return t_quantile(1.0 - alpha, self.df) * self.standard_error

    def p_above(self, null: float) -> float:
        """p of "theta <= null"; small: theta is above."""
        return p_of(self.theta - null, self.standard_error, self.df)

    def p_below(self, null: float) -> float:
        """p of "theta >= null"; small: non-inferior with margin `null`."""
        return p_of(null - self.theta, self.standard_error, self.df)


def t_quantile(quantile: float, df: int) -> float:
    # scipy.special is 50 times faster than scipy.stats here, and looks are taken while the pipeline runs.
    return float(special.stdtrit(df, quantile))


def p_of(distance: float, standard_error: float, df: int) -> float:
    if standard_error == 0.0:
        return 0.0 if distance > 0 else 1.0 if distance < 0 else 0.5
    return float(special.stdtr(df, -distance / standard_error))


def by_process(values: Floats, process: NDArray[np.int64]) -> list[Floats]:
    """The rounds of each process."""
    return [values[process == name] for name in np.unique(process)]


def estimate_units(values: Floats, process: NDArray[np.int64]) -> Estimate | None:
    """The mean over processes with its standard error; over the rounds when there is one process. None below
    two units."""
    groups = by_process(values, process)
    if len(groups) < 2:
        return estimate(values)
    found = [estimate(group) for group in groups]
    whole = [one for one in found if one is not None]
    if len(whole) == len(groups):
        return combine(whole)
    return estimate(np.array([group.mean() for group in groups]))


def combine(groups: Sequence[Estimate]) -> Estimate:
    """The mean of processes from the estimate of each; of one, that itself.

    The process is the unit. Only when three or more processes spread no more than their own rounds account
    for are the rounds taken instead: their standard error is then the larger one, and has more degrees of
    freedom. The error stays within ALPHA whatever the spread between processes (tested), and intervals of few
    launches get a third narrower where there is none."""
    if len(groups) < 2:
        return groups[0]
    between = estimate(np.array([group.theta for group in groups]))
    assert between is not None
    within = float(np.sqrt(sum(group.standard_error**2 for group in groups))) / len(groups)
    if len(groups) < 3 or between.standard_error > within:
        return between
    return Estimate(
        between.theta, within, sum(g.df for g in groups), np.concatenate([g.values for g in groups])
    )


def estimate(values: Floats) -> Estimate | None:
    """Mean of at least two units with its standard error; None for fewer (nothing can be said)."""
    n = len(values)
    if n < 2:
        return None
    return Estimate(float(values.mean()), float(values.std(ddof=1)) / n**0.5, n - 1, values)


def trimmed(values: Floats) -> Estimate:
    """Mean of the middle half of `values` `[n >= 8]`, standard error by Yuen 1974: from the winsorised
    variance, h - 1 df.

    `values` of the result are clipped at the median of |value|, which a change of sign leaves alone: for the
    sign-flip test."""
    n = len(values)
    cut = int(CUT * n)
    ranked = np.sort(values)
    kept = n - 2 * cut
    winsorised = np.clip(values, ranked[cut], ranked[n - cut - 1])
    error = float(winsorised.std(ddof=1)) * ((n - 1) / (kept * (kept - 1))) ** 0.5
    edge = float(np.median(np.abs(values)))
    return Estimate(float(ranked[cut : n - cut].mean()), error, kept - 1, np.clip(values, -edge, edge))


def estimate_middle(values: Floats, process: NDArray[np.int64]) -> Estimate | None:
    """`trimmed` of each process, combined like their means; None where there are too few rounds."""
    groups = by_process(values, process)
    if len(values) < MIDDLE_ROUNDS or min(len(group) for group in groups) < MIDDLE_OF_PROCESS:
        return None
    return combine([trimmed(group) for group in groups])


def falls_on_few_steps(rounds: Rounds) -> bool:
    """True when one arm has more slow steps than the other, or whole segments lose more than their middle
    steps.

    Then the step estimator, which trims slow steps, would hide a cost. Each of the two checks errs in 1 of 20
    runs, towards the plain estimator, which is honest and merely wider."""
    if not len(rounds.step):
        return False
    for values in (rounds.tail, rounds.plain - rounds.step):
        found = estimate_units(values, rounds.process)
        if found is not None and found.p_above(0.0) < TAIL_ALPHA:
            return True
    return False


def falls_on_few_rounds(values: Floats, process: NDArray[np.int64]) -> bool:
    """True when more rounds are far above the middle of their process than far below, or the mean is above
    the middle half's.

    The same two checks for the middle half of the rounds: of the number of far-off rounds by a sign test, of
    their weight by the mean's influence beyond that of the middle half. Under noise that treats both arms
    alike, a round's contrast is symmetric."""
    far_above = far = 0
    beyond: list[Floats] = []
    for group in by_process(values, process):
        ranked, cut = np.sort(group), int(CUT * len(group))
        centre = ranked[cut : len(group) - cut].mean()
        away = group - centre
        width = TAIL_WIDTH * 1.4826 * float(np.median(np.abs(away)))
        far_above += int((away > width).sum())
        far += int((np.abs(away) > width).sum())
        clipped = np.clip(away, ranked[cut] - centre, ranked[len(group) - cut - 1] - centre)
        beyond.append(away - clipped / (1.0 - 2.0 * CUT))
    if far and float(stats.binom.sf(far_above - 1, far, 0.5)) < TAIL_ALPHA:
        return True
    found = estimate(np.concatenate(beyond))
    return found is not None and found.p_above(0.0) < TAIL_ALPHA


def step_is_sharper(rounds: Rounds) -> bool:
    """Steps were timed, and rounds spread much less in them than as a whole."""
    return len(rounds.step) > 1 and _within(rounds.step, rounds.process) < SHARPER * _within(
        rounds.plain, rounds.process
    )


def _within(values: Floats, process: NDArray[np.int64]) -> float:
    """Spread of rounds about the mean of their process, in units that only compare."""
    return float(np.sqrt(sum(((group - group.mean()) ** 2).sum() for group in by_process(values, process))))


def middle_is_sharper(values: Floats, process: NDArray[np.int64]) -> bool:
    """There are enough rounds, and their middle half has much the smaller error. Compared inside
    processes."""
    groups = by_process(values, process)
    if len(values) < MIDDLE_ROUNDS or min(len(group) for group in groups) < MIDDLE_OF_PROCESS:
        return False
    middle = sum(trimmed(group).standard_error ** 2 for group in groups)
    return bool(middle < MIDDLE_SHARPER**2 * sum(group.var(ddof=1) / len(group) for group in groups))


@dataclass(frozen=True, slots=True)
class Judging:
    """The estimator that judges.

    Attributes:
        name: plain, middle or step.
        switched: a sharper one was turned down, because a cost seems to fall on few steps or rounds.
    """

    name: str
    estimate: Estimate
    switched: bool = False


def judging(rounds: Rounds) -> Judging | None:
    """The sharpest estimator that hides nothing; None below two units."""
    sharp, plain = step_is_sharper(rounds), estimate_units(rounds.plain, rounds.process)
    if plain is None:
        return None
    few_steps = sharp and falls_on_few_steps(rounds)
    if sharp and not few_steps:
        found = estimate_units(rounds.step, rounds.process)
        assert found is not None
        return Judging("step", found)
    if not middle_is_sharper(rounds.plain, rounds.process):
        return Judging("plain", plain, switched=few_steps)
    found = estimate_middle(rounds.plain, rounds.process)
    if found is None or few_steps or falls_on_few_rounds(rounds.plain, rounds.process):
        return Judging("plain", plain, switched=True)
    return Judging("middle", found)
