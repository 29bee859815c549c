"""Known costs, put where a collector's may fall, measured as `overhead` does: is each found at its size and
under its own name, and everything else at nothing?

    python -m bench.selfcheck.known_costs [--subject spin|trainer] [--minutes M]"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from scipy.stats import norm
from tabulate import tabulate

from bench.selfcheck.trials import true_percent
from dflash.config import load_config
from steptime.arguments import CONFIG
from steptime.errors import UserError
from steptime.measure.run import Asked, measure
from steptime.progress import Reporter
from steptime.records.costs import Estimate
from steptime.records.pairs import PLACEBO, Layer, Pair
from steptime.report import formatting
from steptime.statistics.effects import ALPHA
from steptime.statistics.judging import BUDGET_PERCENT, Budgets
from steptime.statistics.observed import observe
from steptime.subjects.injection import Injection, Place
from steptime.subjects.pairs import PairSubject

PERCENT: Final = 2.0
"""Of every step; of a tick each second, 20 ms; of a flush each ten, 200 ms."""
CONTROLS: Final = (
    tuple(Injection(PERCENT, p) for p in (Place.STEP, Place.TICK, Place.FLUSH, Place.SINK, Place.LOCK)),
    (Injection(PERCENT, Place.THREAD),),
)
"""By run. Beside one that works a second after its tick every segment with a tick would have to last longer
than that."""
SHARES: Final = (1 / 3, 2 / 3)
"""Of the time, by run."""
MINUTES: Final = 6.0
ERROR: Final = 0.01
"""Of calling a right harness wrong, over all rows together."""
HEADERS: Final = ("switch", "truth", "estimate [90%]", "path %", "tick ms", "flush ms", "off by", "")


@dataclass(frozen=True, slots=True)
class Found:
    """One switch, its true cost beside what was found.

    Attributes:
        truth: percent of a step (path), or ms of a tick or flush, by the layer it falls on; in every other
            layer it is 0.
        limit: half-intervals that an estimate may be off.
    """

    name: str
    layer: Layer | None
    truth: float
    truth_percent: float
    estimate: Estimate | None
    limit: float

    @property
    def off_by(self) -> float | None:
        """Estimate less the truth over the half of the interval that lies towards the truth: inside it up to
        1 or -1."""
        found = self.estimate
        if found is None:
            return None
        error = found.percent - self.truth_percent
        half = found.percent - found.low if error > 0 else found.high - found.percent
        return error / half if half > 0 else 0.0 if error == 0 else float("inf")

    @property
    def right(self) -> bool:
        """Measured, within the bounds that all rows keep together, and a known cost told from nothing."""
        if self.estimate is None or self.off_by is None or abs(self.off_by) > self.limit:
            return False
        return self.layer is None or self.estimate.low > 0


def compare(
    pairs: Sequence[Pair],
    switches: Sequence[str],
    seconds_per: Mapping[Layer, float],
    injections: Sequence[Injection],
    seed: int = 0,
) -> list[Found]:
    """A row for each switch of a run, the known ones first, the placebo last. Pure.

    Args:
        switches: all that were on and off in these pairs, without the placebo; what is none of `injections`
            costs nothing.
    """
    observed = observe(pairs, switches, seconds_per, Budgets(), seed)
    estimates = {**observed.collectors, PLACEBO: observed.placebo}
    known = {one.name: one for one in injections}
    names = [*known, *(name for name in switches if name not in known), PLACEBO]
    limit = float(norm.isf(ERROR / 2 / len(names)) / norm.isf(ALPHA))
    return [_found(name, known.get(name), estimates.get(name), seconds_per, limit) for name in names]


def _found(
    name: str,
    injection: Injection | None,
    estimate: Estimate | None,
    seconds_per: Mapping[Layer, float],
    limit: float,
) -> Found:
    if injection is None:
        return Found(name, None, 0.0, 0.0, estimate, limit)
    percent = true_percent(injection)
    if injection.layer is Layer.PATH:
        return Found(name, Layer.PATH, injection.percent, percent, estimate, limit)
    milliseconds = 10.0 * injection.percent * seconds_per[injection.layer]
    return Found(name, injection.layer, milliseconds, percent, estimate, limit)


def report(rows: Sequence[Found]) -> str:
    """Estimate against truth; "off by" in halves of the interval."""
    units = {Layer.PATH: "%", Layer.TICK: " ms a tick", Layer.FLUSH: " ms a flush", None: ""}
    table = [
        [
            row.name,
            f"{row.truth:g}{units[row.layer]}",
            "-" if row.estimate is None else formatting.estimate(row.estimate),
            *formatting.layers(row.estimate),
            "-" if row.off_by is None else f"{row.off_by:+.1f}",
            "" if row.right else "WRONG",
        ]
        for row in rows
    ]
    return tabulate(table, HEADERS, tablefmt="github", disable_numparse=True)


def measure_known(
    make: Callable[[Sequence[Injection]], PairSubject], minutes: float, seed: int, reporter: Reporter
) -> tuple[list[Found], list[str]]:
    """Measure a subject with the known costs among its switches; rows, and what went wrong."""
    rows: list[Found] = []
    faults: list[str] = []
    for injections, share in zip(CONTROLS, SHARES, strict=True):
        subject = make(injections)
        switches = tuple(name for name in subject.switches if name != PLACEBO)
        # No look at all together may end it: a budget that cannot be shown to be kept.
        asked = Asked(switches, BUDGET_PERCENT / 100, 60.0 * minutes * share, seed=seed)
        run = measure(subject, asked, reporter, flushes=0, clock=getattr(subject, "clock_s", time.monotonic))
        rows += compare(run.pairs, switches, run.seconds_per, injections, seed)
        faults += run.faults
    return rows, faults


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table. Returns 0 when all is found as it should be, else 1."""
    from bench.subjects.registry import SUBJECTS  # heavy: torch

    parser = argparse.ArgumentParser(
        prog="python -m bench.selfcheck.known_costs", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--subject", default="spin", help="spin (default) or trainer")
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"of pairs (default {MINUTES:g})")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        settings = load_config(options.config, options.settings)
        kind = SUBJECTS[options.subject]
        rows, faults = measure_known(
            lambda injections: kind.make_pairs(settings, injections=injections),
            options.minutes,
            options.seed,
            Reporter(),
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report(rows))
    print("\n".join(faults), end="\n" if faults else "")
    return int(bool(faults) or not all(row.right for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
