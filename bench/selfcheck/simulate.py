"""How often is the judge right? Prints coverage, false alarms and power, each with its own error.

    python -m bench.selfcheck.simulate

Simulated segments go through the same estimators, stopping rule and verdict as measured ones. The noise is of
the character found on shared machines: half-second segments of a fixed step have a paired spread of 1.5 to
2.5% and a lag-1 correlation of 0.3 to 0.5, and their middle steps are steadier than their mean."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.stats import binomtest
from scipy.stats import t as t_distribution
from tabulate import tabulate

from bench.records.types import Interval, Verdict, log_ratio
from bench.statistics.contrasts import Floats, Rounds, midmean, tail_excess
from bench.statistics.intervals import ALPHA, NOMINAL, interval
from bench.statistics.stopping import MIN_ROUNDS, SHARE_OF_BUDGET, half_width, looks
from bench.statistics.verdict import classify

STEPS: Final = 16
CAP: Final = 64
"""Rounds that the time allows."""


@dataclass(frozen=True, slots=True)
class SegmentNoise:
    """SegmentNoise of a machine, log units of a step's time.

    Attributes:
        step: SD of each step by itself.
        slow: SD of the part that segments share with their neighbours, an AR(1) over segments with
            `correlation`.
        drift: change from the first to the last segment of a run of CAP rounds.
        stalls, stall: chance that a step stalls, and the mean of its (exponential) excess as a share of the
            step.
    """

    name: str
    step: float = 0.015
    slow: float = 0.012
    correlation: float = 0.8
    drift: float = 0.0
    stalls: float = 0.03
    stall: float = 0.25


NOISES: Final = (
    SegmentNoise("independent", correlation=0.0),
    SegmentNoise("shared machine", correlation=0.8),
    SegmentNoise("slow waves", slow=0.02, correlation=0.95),
    SegmentNoise("drift 10%", drift=0.10),
    SegmentNoise("heavy stalls", stalls=0.08, stall=0.5),
    SegmentNoise("quiet", step=0.004, slow=0.002, stalls=0.002, stall=0.1),
)
SHARED: Final = NOISES[1]


@dataclass(frozen=True, slots=True)
class Cost:
    """What the slower arm costs: `dense` on every step, or also `size` on a share `rate` of the steps. Log
    and share units."""

    dense: float = 0.0
    rate: float = 0.0
    size: float = 0.0

    @property
    def theta(self) -> float:
        """Log ratio of the mean step times."""
        return self.dense + float(np.log1p(self.rate * self.size))


def step_logs(noise: SegmentNoise, runs: int, segments: int, steps: int, rng: np.random.Generator) -> Floats:
    """ln of step times in the order they are taken, `[runs, segments, steps]`, around 0; one arm, no cost."""
    kicks = rng.normal(size=(runs, segments))
    slow = np.empty((runs, segments))
    slow[:, 0] = kicks[:, 0]
    for i in range(1, segments):
        slow[:, i] = noise.correlation * slow[:, i - 1] + np.sqrt(1 - noise.correlation**2) * kicks[:, i]
    level = noise.slow * slow + noise.drift * np.arange(segments) / (2 * CAP)
    stalled = rng.random((runs, segments, steps)) < noise.stalls
    excess = np.log1p(np.where(stalled, rng.exponential(noise.stall, (runs, segments, steps)), 0.0))
    result: Floats = level[:, :, None] + noise.step * rng.normal(size=(runs, segments, steps)) + excess
    return result


def simulate(
    noise: SegmentNoise,
    cost: Cost,
    runs: int,
    rng: np.random.Generator,
    rounds: int = CAP,
    steps: int = STEPS,
) -> list[Rounds]:
    """`runs` runs of `rounds` rounds of two segments each, arm against control in random order."""
    logs = step_logs(noise, runs, 2 * rounds, steps, rng).reshape(runs, rounds, 2, steps)
    swap = rng.random((runs, rounds)) < 0.5
    control = np.where(swap[..., None], logs[:, :, 1], logs[:, :, 0])
    arm = np.where(swap[..., None], logs[:, :, 0], logs[:, :, 1]) + cost.dense
    arm = arm + np.log1p(np.where(rng.random(arm.shape) < cost.rate, cost.size, 0.0))
    return contrast(arm, control, np.log(rng.uniform(0.5, 1.5, steps)))


def contrast(arm: Floats, control: Floats, base: Floats) -> list[Rounds]:
    """Runs of rounds from log step times `[runs, rounds, steps]`; `base` `[steps]`: log of each batch's own
    length."""
    plain = np.log(np.exp(arm + base).sum(-1)) - np.log(np.exp(control + base).sum(-1))
    weights = np.exp(base + np.minimum(arm, control))
    middle = midmean(arm - control, weights)
    tail = tail_excess(arm - control, weights, middle)
    process = np.zeros(plain.shape[1], dtype=np.int64)
    return [Rounds(process, *row) for row in zip(plain, middle, tail, strict=True)]


def first(rounds: Rounds, n: int) -> Rounds:
    """The first n rounds."""
    return Rounds(rounds.process[:n], rounds.plain[:n], rounds.step[:n], rounds.tail[:n])


def run_rule(rounds: Rounds, budget_percent: float, first_look: int = MIN_ROUNDS) -> tuple[int, Interval]:
    """Apply the stopping rule to a run; rounds used and the interval printed."""
    target = SHARE_OF_BUDGET * log_ratio(budget_percent)
    for n in looks(first_look, len(rounds)):
        so_far = first(rounds, n)
        if half_width(so_far) <= target or n == len(rounds):
            found = interval(so_far)
            assert found is not None
            return n, found
    raise AssertionError("looks always end at the last round")


@dataclass(frozen=True, slots=True)
class Rates:
    """What became of `runs` runs whose true slowdown is `percent`."""

    noise: str
    percent: float
    runs: int
    rounds: float
    low_held: int
    """Runs whose lower bound was not above the truth."""
    high_held: int
    slower: int
    """Runs with L > 0."""
    verdicts: dict[Verdict, int]
    plain: int
    """Runs judged by the plain estimator."""


def rates(
    noise: SegmentNoise, cost: Cost, runs: int, budget_percent: float, seed: int, rounds: int = CAP
) -> Rates:
    """Simulate, judge, count."""
    percent = -100.0 * float(np.expm1(-cost.theta))
    rng = np.random.default_rng([seed, hash_of(noise.name), int(1e6 * cost.theta), rounds])
    used, found = zip(
        *(run_rule(r, budget_percent) for r in simulate(noise, cost, runs, rng, rounds)), strict=True
    )
    verdicts = [classify(i, budget_percent) for i in found]
    return Rates(
        noise=noise.name,
        percent=percent,
        runs=runs,
        rounds=float(np.mean(used)),
        low_held=sum(i.low <= percent for i in found),
        high_held=sum(i.high >= percent for i in found),
        slower=sum(i.low > 0 for i in found),
        verdicts={v: verdicts.count(v) for v in Verdict},
        plain=sum(i.estimator == "plain" for i in found),
    )


def hash_of(name: str) -> int:
    """A number from a name that is the same in every process."""
    return int.from_bytes(name.encode()[:8], "big") % 2**31


def share(hits: int, runs: int) -> str:
    """`94.1% (92.5-95.5)`: a rate with its exact 95% interval."""
    bounds = binomtest(hits, runs).proportion_ci(0.95)
    return f"{100 * hits / runs:.1f}% ({100 * bounds.low:.1f}-{100 * bounds.high:.1f})"


def stopping_error(nominal: float, spread: float, runs: int, seed: int = 0, cap: int = 200) -> float:
    """Share of runs of normal contrasts whose lower bound, taken at `nominal` where the rule stops, lies
    above the truth.

    `spread`: SD of a round's contrast as a share of the budget. The worst spreads are those that stop after
    about 20 rounds."""
    values = np.random.default_rng(seed).normal(0.0, spread, (runs, cap))
    above = np.zeros(runs, dtype=bool)
    running = np.ones(runs, dtype=bool)
    for n in looks(last=cap):
        so_far = values[:, :n]
        half = t_distribution.isf(nominal, n - 1) * so_far.std(axis=1, ddof=1) / n**0.5
        stops = running & ((half <= SHARE_OF_BUDGET) | (n == cap))
        above |= stops & (so_far.mean(axis=1) - half > 0)
        running &= ~stops
    return float(above.mean())


def stopping_report(runs: int) -> str:
    """Why bounds are taken at NOMINAL: the error that remains of each nominal error, by spread."""
    spreads = (0.4, 0.6, 0.7, 0.8, 1.0, 1.5, 2.0)
    rows = [
        [f"{100 * nominal:g}%", *(f"{100 * stopping_error(nominal, s, runs):.1f}%" for s in spreads)]
        for nominal in (ALPHA, NOMINAL)
    ]
    text = tabulate(
        rows, ["nominal", *(f"spread {s:g}" for s in spreads)], tablefmt="github", disable_numparse=True
    )
    return (
        f"error of a bound under the stopping rule, spread of a round as a share of the budget, {runs} "
        f"runs\n\n{text}\n"
    )


def report(found: Iterable[Rates], budget_percent: float) -> str:
    """The table."""
    rows = [
        [
            r.noise,
            f"{r.percent:.2f}%",
            f"{r.rounds:.0f}",
            share(r.low_held, r.runs),
            share(r.high_held, r.runs),
            share(r.slower, r.runs),
            share(r.verdicts[Verdict.OVER], r.runs),
            share(r.verdicts[Verdict.WITHIN], r.runs),
            f"{100 * r.plain / r.runs:.0f}%",
        ]
        for r in found
    ]
    head = ["noise", "true cost", "rounds", "L holds", "U holds", "L > 0", "over", "within", "plain judged"]
    text = tabulate(rows, head, tablefmt="github", disable_numparse=True)
    return (
        f"budget {budget_percent:g}%, at most {CAP} rounds of two segments, exact 95% intervals in "
        f"brackets\n\n{text}\n"
    )


COSTS: Final = (
    Cost(),
    Cost(dense=log_ratio(0.5)),
    Cost(dense=log_ratio(1.0)),
    Cost(dense=log_ratio(2.0)),
    Cost(dense=log_ratio(5.0)),
    Cost(rate=0.05, size=0.4),
)
"""None, half the budget, the budget, 2%, 5%, and 2% that falls on one step in twenty."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.selfcheck.simulate", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--runs", type=int, default=2000, help="runs in each row (default 2000)")
    parser.add_argument("--budget", type=float, default=1.0, help="percent (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    print(stopping_report(10 * options.runs))
    found = [
        rates(noise, cost, options.runs, options.budget, options.seed) for noise in NOISES for cost in COSTS
    ]
    print(report(found, options.budget))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
