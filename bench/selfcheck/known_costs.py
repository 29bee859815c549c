"""Known costs, put where a collector's may fall, measured as `overhead` does: is each found at its size and
under its own name, and everything else at nothing?

    python -m bench.selfcheck.known_costs [--subject spin|trainer] [--minutes M] [--rows FILE]

With a file of rows a check goes on where the one before it ended, and prints all of them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scipy.stats import norm

from bench.selfcheck import known_rows
from bench.selfcheck.known_rows import Found, KnownRow
from bench.selfcheck.taking import commit_in_words, machine_in_words
from bench.selfcheck.trials import true_percent
from bench.syncs.faults.planted import BUSY_SHARE, HELD_SHARE
from dflash.config import load_config
from steptime import run_files
from steptime.arguments import CONFIG
from steptime.errors import UserError, nearest
from steptime.machine import state
from steptime.measure.run import Asked, Measured, measure
from steptime.progress import Reporter
from steptime.records.costs import Estimate
from steptime.records.pairs import PLACEBO, Layer, Pair
from steptime.statistics.effects import ALPHA
from steptime.statistics.judging import BUDGET_PERCENT, Budgets
from steptime.statistics.observed import observe
from steptime.subjects.injection import Injection, Place
from steptime.subjects.pairs import PairSubject

ERROR: Final = 0.01
"""Of calling a right harness wrong, over all rows of a run together."""
MINUTES: Final = 3.0
STAGE_PERCENT: Final = 5.0


@dataclass(frozen=True, slots=True)
class Plant:
    """A planted fault of `bench.syncs.faults.planted` whose cost is known, or known to lie in a range.

    Attributes:
        most_percent: share of each tick's period, at the tick.
        least_percent: None: it is `most_percent`.
    """

    name: str
    most_percent: float
    least_percent: float | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """The known costs of one run. `share`: of its minutes, against those of another run."""

    name: str
    injections: tuple[Injection, ...] = ()
    plant: Plant | None = None
    share: float = 1.0


def _each_layer(percent: float, *more: Place) -> tuple[Injection, ...]:
    return tuple(Injection(percent, place) for place in (Place.STEP, Place.TICK, Place.FLUSH, *more))


CASES: Final = (
    Case("1%", _each_layer(1.0)),
    Case("2%", _each_layer(2.0, Place.SINK, Place.LOCK)),
    Case("5%", _each_layer(5.0)),
    # By itself: every segment with a tick lasts longer than the second after which it works.
    Case("late", (Injection(2.0, Place.THREAD),), share=2.0),
    Case("stage", (Injection(STAGE_PERCENT, Place.TARGET),)),
    Case("busy_loop", plant=Plant("busy_loop", 100.0 * BUSY_SHARE, 1.0)),
    Case("held_gil", plant=Plant("held_gil", 100.0 * HELD_SHARE)),
)
"""2% is 20 ms of a tick each second, 200 ms of a flush each ten. A cost in the targets alone is lost as far
as they are the slowest stage: from nothing to all of it. A busy loop in the monitor takes half of each tick's
period from whoever wants its core or the interpreter's lock."""


def cases_of(subject: str, names: Sequence[str] = ()) -> tuple[Case, ...]:
    """Those that the subject can have: the light one has one thread, so neither stages nor plants.

    Raises:
        UserError: no such case.
    """
    known = {case.name: case for case in CASES}
    for name in names:
        if name not in known:
            raise UserError(
                f"--cases {name}: no such case{nearest(name, list(known))}; there are {', '.join(known)}"
            )
    chosen = [known[name] for name in names or known]
    if subject != "spin":
        return tuple(chosen)
    return tuple(one for one in chosen if one.plant is None and one.name != "stage")


def compare(
    pairs: Sequence[Pair],
    switches: Sequence[str],
    seconds_per: Mapping[Layer, float],
    injections: Sequence[Injection] = (),
    seed: int = 0,
    plant: Plant | None = None,
) -> list[Found]:
    """A row for each switch of a run, the known ones first, the placebo last. Pure.

    Args:
        switches: all that were on and off in these pairs, without the placebo; what is none of `injections`
            and not the plant costs nothing.
    """
    observed = observe(pairs, switches, seconds_per, Budgets(), seed)
    estimates = {**observed.collectors, PLACEBO: observed.placebo}
    known = [one.name for one in injections] + ([plant.name] if plant else [])
    names = [*known, *(name for name in switches if name not in known), PLACEBO]
    limit = float(norm.isf(ERROR / 2 / len(names)) / norm.isf(ALPHA))
    by_name = {one.name: one for one in injections}
    found = []
    for name in names:
        estimate = estimates.get(name)
        if plant is not None and name == plant.name:
            found.append(_planted(plant, estimate, limit))
        elif name in by_name:
            found.append(_injected(by_name[name], estimate, limit))
        else:
            found.append(Found(name, None, 0.0, 0.0, estimate, limit))
    return found


def _injected(one: Injection, estimate: Estimate | None, limit: float) -> Found:
    least = 0.0 if one.place is Place.TARGET else None
    return Found(one.name, one.layer, one.percent, true_percent(one), estimate, limit, least)


def _planted(plant: Plant, estimate: Estimate | None, limit: float) -> Found:
    most = true_percent(Injection(plant.most_percent, Place.TICK))
    return Found(plant.name, Layer.TICK, plant.most_percent, most, estimate, limit, plant.least_percent)


Make = Callable[[Sequence[Injection], str], PairSubject]


def run_case(
    make: Make, case: Case, minutes: float, seed: int, reporter: Reporter
) -> tuple[list[Found], Measured]:
    """Measure a subject with the case's known costs among its switches."""
    subject = make(case.injections, case.plant.name if case.plant else "")
    switches = tuple(name for name in subject.switches if name != PLACEBO)
    # No look at all together may end it: a budget that cannot be shown to be kept.
    asked = Asked(switches, BUDGET_PERCENT / 100, 60.0 * minutes * case.share, seed=seed)
    run = measure(subject, asked, reporter, flushes=0, clock=getattr(subject, "clock_s", time.monotonic))
    return compare(run.pairs, switches, run.seconds_per, case.injections, seed, case.plant), run


def rows_of(subject: str, case: Case, seed: int, found: Sequence[Found], run: Measured) -> list[KnownRow]:
    """The rows of a run as they are kept."""
    created, commit, machine = run_files.now_utc(), commit_in_words(), machine_in_words()
    unfit = tuple(state.unfit(run.before, run.after))
    minutes = round(run.minutes, 2)
    return [
        KnownRow(subject, case.name, seed, minutes, created, commit, machine, unfit, one) for one in found
    ]


def _unmeasured(found: Sequence[Found]) -> list[str]:
    names = [one.name for one in found if one.estimate is None]
    return [f"too few pairs in these minutes for {', '.join(names)}"] if names else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table. Returns 0 when all is found as it should be, else 1."""
    from bench.subjects.registry import SUBJECTS  # heavy: torch

    parser = argparse.ArgumentParser(
        prog="python -m bench.selfcheck.known_costs", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--subject", default="spin", help="spin (default) or trainer")
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"of each run (default {MINUTES:g})")
    parser.add_argument(
        "--cases", default="", help=f"of {', '.join(case.name for case in CASES)} (default all)"
    )
    parser.add_argument("--rows", type=Path, help="file of rows that these are added to")
    parser.add_argument("--runs", type=int, default=1, help="runs of each case, those in the file included")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rows: list[KnownRow] = []
    faults: list[str] = []
    try:
        rows = known_rows.read(options.rows) if options.rows else []
        settings = load_config(options.config, options.settings)
        kind = SUBJECTS[options.subject]
        for case in cases_of(options.subject, [name for name in options.cases.split(",") if name]):
            for number in range(known_rows.runs_of(rows, options.subject, case.name), options.runs):
                seed = options.seed + number
                found, run = run_case(
                    lambda injections, plant: kind.make_pairs(settings, injections=injections, plant=plant),
                    case,
                    options.minutes,
                    seed,
                    Reporter(),
                )
                wrong = [*run.faults, *_unmeasured(found)]
                faults += [f"{case.name}: {fault}" for fault in wrong]
                if wrong:
                    break  # what a crash left, or too few pairs, say nothing
                rows += (new := rows_of(options.subject, case, seed, found, run))
                if options.rows:
                    known_rows.append(options.rows, new)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(known_rows.table(rows))
    print("\n".join(faults), end="\n" if faults else "")
    return int(bool(faults) or not all(row.found.right for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
