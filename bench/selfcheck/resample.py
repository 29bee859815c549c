"""How often is the judge right in this machine's own noise?

    python -m bench.selfcheck.resample GATES.jsonl...

`bench.selfcheck.simulate` makes its noise up; a self-check's gates are real, and few. Between the two:
launches are drawn from those of stored gates, and the rounds of each from its own, about a mean that is
known. So the noise has the tails and the skewness of the machine, and rates have a small error. It cannot
show whether rounds hang on each other, or the machine on the hour."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tabulate import tabulate

from bench.gate.verdict import BASE, HEAD
from bench.records.types import Verdict, log_ratio, slowdown_percent
from bench.selfcheck import stored_gates
from bench.selfcheck.rates import LaunchNoise
from bench.selfcheck.simulate import Cost, share
from bench.selfcheck.stored_gates import Trial
from bench.statistics.contrasts import Floats, Rounds, contrasts
from bench.statistics.estimates import by_process
from bench.statistics.intervals import interval
from bench.statistics.verdict import classify
from steptime.errors import UserError

COSTS = (
    Cost(),
    Cost(dense=log_ratio(0.5)),
    Cost(dense=log_ratio(1.0)),
    Cost(dense=log_ratio(2.0)),
    Cost(rate=0.05, size=0.22),
    Cost(rate=0.05, size=0.49),
)
"""None, half the budget, the budget, twice the budget; and about 1% and 2% that fall on one round in
twenty."""
MIN_ROUNDS = 8
"""Launches of fewer rounds say too little of their own noise."""
BUDGET_PERCENT = 1.0


@dataclass(frozen=True, slots=True)
class Pool:
    """Launches of stored gates, log units.

    Attributes:
        launches: the rounds of each about their own mean.
        between: how far launches lie apart beyond what their rounds account for, as a standard deviation.
    """

    launches: tuple[Floats, ...]
    between: float


def pool_of(stored: Iterable[Trial]) -> Pool:
    """Every launch of the gates, whatever was injected.

    Raises:
        UserError: none that could be used.
    """
    launches: list[Floats] = []
    noise = LaunchNoise("", 0.0)
    for trial in stored:
        rounds = contrasts(trial.segments, (HEAD,), (BASE,), trial.cycle)
        launches += [
            group - group.mean()
            for group in by_process(rounds.plain, rounds.process)
            if len(group) >= MIN_ROUNDS
        ]
        noise.add(rounds)
    if not launches:
        raise UserError(f"no launch of at least {MIN_ROUNDS} rounds in these gates")
    excess = (noise.between - noise.expected) / noise.between_df if noise.between_df else 0.0
    return Pool(tuple(launches), max(0.0, excess) ** 0.5)


def draw(pool: Pool, cost: Cost, launches: int, times: float, rng: np.random.Generator) -> Rounds:
    """The rounds of one made-up gate. `times`: rounds of a launch, as a multiple of those of the launch it is
    drawn from."""
    groups = []
    for place in rng.integers(0, len(pool.launches), launches):
        source = pool.launches[place]
        count = max(2, round(times * len(source)))
        stalls = np.where(rng.random(count) < cost.rate, np.log1p(cost.size), 0.0)
        groups.append(rng.choice(source, count) + pool.between * rng.normal() + cost.dense + stalls)
    process = np.repeat(np.arange(launches), [len(group) for group in groups])
    none = np.empty(0)
    return Rounds(process, np.concatenate(groups), none, none)


def theta(cost: Cost) -> float:
    """Mean contrast of a round: what plain estimates."""
    return cost.dense + cost.rate * float(np.log1p(cost.size))


def row(pool: Pool, cost: Cost, launches: int, times: float, runs: int, seed: int) -> list[str]:
    """Judge `runs` made-up gates of one cost; a row of the table."""
    rng = np.random.default_rng([seed, launches, int(1e6 * theta(cost)), int(100 * times)])
    truth = slowdown_percent(theta(cost))
    found = [
        one for _ in range(runs) if (one := interval(draw(pool, cost, launches, times, rng))) is not None
    ]
    verdicts = [classify(one, BUDGET_PERCENT) for one in found]
    width = float(np.median([(one.high - one.low) / 2 for one in found]))
    counts = (
        sum(one.low <= truth for one in found),
        sum(one.high >= truth for one in found),
        sum(one.low > 0 for one in found),
        verdicts.count(Verdict.OVER),
        verdicts.count(Verdict.WITHIN),
    )
    judged = f"{100 * sum(one.estimator == 'middle' for one in found) / len(found):.0f}%"
    where = "one round in twenty" if cost.rate else "every round"
    return [
        f"{launches}",
        f"{truth:.2f}%",
        where if truth else "-",
        f"{width:.2f}%",
        *(share(n, len(found)) for n in counts),
        judged,
    ]


HEADERS = (
    "launches",
    "true cost",
    "falls on",
    "half-width",
    "L holds",
    "U holds",
    "L > 0",
    "over",
    "within",
    "middle judged",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.selfcheck.resample", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="gates.jsonl of self-checks")
    parser.add_argument("--subject", default="", metavar="NAME", help="only the gates of this subject")
    parser.add_argument(
        "--launches",
        type=int,
        nargs="+",
        default=[5, 10],
        metavar="N",
        help="launches of a gate (default 5 10)",
    )
    parser.add_argument(
        "--times", type=float, default=1.0, metavar="X", help="rounds of a launch, as a multiple (default 1)"
    )
    parser.add_argument("--runs", type=int, default=2000, help="gates in each row (default 2000)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        stored = [trial for file in options.files for trial in stored_gates.read(file)]
        pool = pool_of(trial for trial in stored if options.subject in ("", trial.subject))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rounds = float(np.mean([len(one) for one in pool.launches]))
    print(
        f"{len(pool.launches)} launches of {rounds:.0f} rounds on average; launches lie "
        f"{100 * pool.between:.2f}% apart besides; rounds of a launch x {options.times:g}\n"
    )
    rows = [
        row(pool, cost, launches, options.times, options.runs, options.seed)
        for launches in options.launches
        for cost in COSTS
    ]
    print(tabulate(rows, HEADERS, tablefmt="github", disable_numparse=True))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
