"""How often is the control of a run right? Made-up runs in which it loses what it says, half of it, nothing.

    python -m bench.selfcheck.control_runs [RECEIPT.json...] [--minutes 4] [--runs 2000]

The noise is that of `bench.selfcheck.pair_runs`, by default made up, with receipts their pairs' own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from scipy.stats import binomtest
from tabulate import tabulate

from bench.selfcheck.pair_runs import COLLECTORS, Noise, Session, made_up, stored_halves, stretches
from steptime.errors import UserError
from steptime.records.costs import KnownCost
from steptime.records.pairs import CONTROL, Layer, Pair, Question, Segment
from steptime.records.types import log_ratio
from steptime.statistics.control import CONTROL_PERCENT, fault, known_cost
from steptime.statistics.design import draws, shares_for

SHARES: Final = (1.0, 0.5, 0.0)
"""Of what the control says that it loses: what is really lost."""
HEADERS: Final = ("minutes", "really lost", "measured as", "half-width", "interval holds 2%", "run refused")
REDRAWS: Final = 999


def control_of(noise: Noise, session: Session, share: float, seed: int) -> KnownCost:
    """Draw and measure one run whose control says that it loses 2%, and loses `share` of that."""
    rng = np.random.default_rng([seed, 3])
    shares = shares_for(session.lengths_s, 60.0 * session.minutes, session.together)
    endless = draws(
        COLLECTORS, seed, session.lengths_s, shares=shares, together=session.together, control=True
    )
    taken, spent_s = [], 0.0
    while (spent_s := spent_s + session.lengths_s[(draw := next(endless)).layer]) <= 60.0 * session.minutes:
        if draw.layer is Layer.PATH and draw.question is Question.EACH:
            taken.append(draw)
    theta = log_ratio(CONTROL_PERCENT)

    def half(on: frozenset[str], extra: float) -> Segment:
        here = CONTROL in on
        seconds = session.half_s * float(np.exp(extra + share * theta * here))
        said_s = seconds * CONTROL_PERCENT / 100.0 * here
        return Segment(tuple(sorted(on)), 1, 1000, seconds, control_s=said_s)

    halves = noise(rng, Layer.PATH, len(taken))
    pairs = [
        Pair(number, draw.layer, draw.question, half(draw.first, first), half(draw.second, second))
        for number, (draw, (first, second)) in enumerate(zip(taken, halves, strict=True))
    ]
    found = known_cost(pairs, COLLECTORS, seed, REDRAWS)
    assert found is not None
    return found


def rows(noise: Noise, minutes: float, runs: int, seed: int = 0) -> list[list[str]]:
    """A row for each share, with exact 95% bounds of how often a run is refused."""
    table = []
    for share in SHARES:
        found = [control_of(noise, Session(minutes), share, seed * runs + run) for run in range(runs)]
        refused = sum(bool(fault(one)) for one in found)
        low, high = binomtest(refused, runs).proportion_ci(0.95, "exact")
        held = sum(one.estimate.low <= one.percent <= one.estimate.high for one in found)
        table.append(
            [
                f"{minutes:g}",
                f"{share * CONTROL_PERCENT:g}%",
                f"{np.mean([one.estimate.percent for one in found]):.2f}%",
                f"{np.median([one.estimate.high - one.estimate.low for one in found]) / 2:.2f}%",
                f"{100 * held / runs:.1f}%",
                f"{100 * refused / runs:.1f}% ({100 * low:.1f} to {100 * high:.1f})",
            ]
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.selfcheck.control_runs", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="RECEIPT", help="receipts of overhead")
    parser.add_argument("--minutes", type=float, default=4.0, help="of pairs (default 4)")
    parser.add_argument("--runs", type=int, default=2000, help="runs in each row (default 2000)")
    options = parser.parse_args(arguments)
    try:
        noise = stretches(stored_halves(options.files)) if options.files else made_up()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = rows(noise, options.minutes, options.runs)
    print(tabulate(table, HEADERS, tablefmt="github", disable_numparse=True))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
