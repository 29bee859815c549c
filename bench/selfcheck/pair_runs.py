"""How often is `overhead` right? Whole runs made up from noise and known costs, and judged by its own code.

    python -m bench.selfcheck.pair_runs [RECEIPT.json...] [--minutes 4] [--runs 2000]

Without files the noise is made up: autocorrelated halves with stalls. With receipts it is their pairs' own:
stretches of neighbouring pairs, as they came, drawn with new coins; so it has the tails, the drift and the
autocorrelation of that machine. A known cost is then laid on one collector, or on each equally, and the run
is judged as it would be. Costs that the stored pairs had really are part of that noise."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from scipy.signal import lfilter
from scipy.stats import binomtest
from tabulate import tabulate

from steptime.errors import UserError
from steptime.records.pairs import ALL, Layer, Pair, Segment
from steptime.records.types import ExitCode, Verdict, log_ratio, slowdown_percent
from steptime.statistics.design import TOGETHER, Draw, draws, shares_for
from steptime.statistics.effects import Sample, redraw, total
from steptime.statistics.judging import Budgets, Evidence, Judgement, judge, judge_gate
from steptime.statistics.observed import observe
from steptime.statistics.one_switch import Observed

Floats = NDArray[np.float64]
Noise = Callable[[np.random.Generator, Layer, int], Floats]
"""(generator, layer, pairs) -> `[pairs, 2]`, log seconds per token of both halves."""

COLLECTORS: Final = ("batch", "grads", "losses", "memory", "pipeline", "steps")
COSTS: Final = (0.0, 0.5, 1.0, 2.0, 5.0)
"""Percent of the throughput that all together lose, in the tables."""
CLEAN: Final = {"syncs": 0, "operations": 0, "copies": 0, "allocations": 0}


@dataclass(frozen=True, slots=True)
class Session:
    """What a made-up run measures.

    Attributes:
        minutes: of pairs.
        lengths_s: seconds of a pair of each layer.
        seconds_per: seconds between two ticks and two flushes.
        half_s: seconds of one half, which a cost in the path multiplies.
    """

    minutes: float
    lengths_s: Mapping[Layer, float] = field(
        default_factory=lambda: {Layer.PATH: 0.27, Layer.TICK: 0.28, Layer.FLUSH: 0.32}
    )
    seconds_per: Mapping[Layer, float] = field(
        default_factory=lambda: {Layer.PATH: 0.0, Layer.TICK: 1.0, Layer.FLUSH: 10.0}
    )
    half_s: float = 0.135
    together: float = TOGETHER


@dataclass(frozen=True, slots=True)
class Cost:
    """A known cost of one collector, log units of the whole.

    Attributes:
        layer: where it falls.
        one_in: it falls on one half in so many, each then so many times as much.
    """

    theta: float
    layer: Layer = Layer.PATH
    one_in: int = 1


def made_up(spread: float = 0.10, correlation: float = 0.63, stalls: float = 0.02) -> Noise:
    """Autocorrelated halves, of which a share stalls by a quarter: two shared cores."""

    def noise(rng: np.random.Generator, _layer: Layer, pairs: int) -> Floats:
        shocks = rng.normal(size=2 * pairs + 50) * (1 - correlation**2) ** 0.5
        series = spread * lfilter([1.0], [1.0, -correlation], shocks)[50:]
        return np.asarray(series + np.where(rng.random(2 * pairs) < stalls, 0.25, 0.0)).reshape(-1, 2)

    return noise


def stretches(stored: Mapping[Layer, Floats], length: int = 32) -> Noise:
    """Stretches of `length` neighbouring stored pairs, from anywhere, the halves of all of a stretch swapped
    by a coin. A layer without stored pairs takes the path's."""

    def noise(rng: np.random.Generator, layer: Layer, pairs: int) -> Floats:
        pool = stored.get(layer, stored[Layer.PATH])
        parts = []
        for _ in range(-(-pairs // length)):
            part = np.take(pool, rng.integers(len(pool)) + np.arange(length), axis=0, mode="wrap")
            parts.append(part[:, ::-1] if rng.random() < 0.5 else part)
        return np.concatenate(parts)[:pairs]

    return noise


def run_of(
    noise: Noise, session: Session, costs: Mapping[str, Cost], seed: int, budgets: Budgets | None = None
) -> Judgement:
    """Draw, measure and judge one run. `costs` by collector."""
    budgets = budgets or Budgets()
    rng = np.random.default_rng([seed, 1])
    pairs = _pairs(noise, session, costs, rng, seed)
    redraws = 999  # a p of 0.001 suffices to name one of six
    found = observe(pairs, COLLECTORS, session.seconds_per, budgets, seed, redraws=redraws)
    evidence = Evidence(
        collectors=tuple(Observed(name, found.collectors.get(name), 0.0, CLEAN) for name in COLLECTORS),
        all=Observed(ALL, found.all, 0.0, CLEAN),
        minutes=session.minutes,
        incomplete=found.incomplete,
        losses_equal=True,
        counted=True,
    )
    return judge(evidence, budgets)


def _pairs(
    noise: Noise, session: Session, costs: Mapping[str, Cost], rng: np.random.Generator, seed: int
) -> list[Pair]:
    shares = shares_for(session.lengths_s, 60.0 * session.minutes, session.together)
    plan, spent = [], 0.0
    for draw in draws(COLLECTORS, seed, session.lengths_s, shares=shares, together=session.together):
        spent += session.lengths_s[draw.layer]
        if spent > 60.0 * session.minutes:
            break
        plan.append(draw)
    halves = {layer: iter(noise(rng, layer, sum(d.layer is layer for d in plan))) for layer in Layer}
    return [
        _pair(draw, number, next(halves[draw.layer]), session, costs, rng) for number, draw in enumerate(plan)
    ]


def _pair(
    draw: Draw,
    number: int,
    noise: Floats,
    session: Session,
    costs: Mapping[str, Cost],
    rng: np.random.Generator,
) -> Pair:
    def half(on: frozenset[str], extra: float) -> Segment:
        extra_s = 0.0
        for name, cost in costs.items():
            if (
                name in on
                and cost.layer is draw.layer
                and (cost.one_in == 1 or rng.random() * cost.one_in < 1)
            ):
                if draw.layer is Layer.PATH:
                    extra += cost.theta * cost.one_in
                else:
                    extra_s += cost.theta * cost.one_in * session.seconds_per[draw.layer]
        return Segment(tuple(sorted(on)), 1, 1000, session.half_s * float(np.exp(extra)) + extra_s)

    first, second = half(draw.first, float(noise[0])), half(draw.second, float(noise[1]))
    return Pair(number, draw.layer, draw.question, first, second, losses_equal=True)


def stored_halves(files: Sequence[Path]) -> dict[Layer, Floats]:
    """Log seconds per token of the halves of stored pairs, by layer, `[pairs, 2]`, about their file's mean.

    Raises:
        UserError: a file that holds no pairs, or not enough of them in the path.
    """
    found: dict[Layer, list[Floats]] = {}
    for file in files:
        try:
            pairs = TypeAdapter(list[Pair]).validate_python(
                json.loads(file.read_text())["pairs"], strict=False
            )
        except (OSError, KeyError, TypeError, json.JSONDecodeError, ValidationError) as error:
            raise UserError(f"{file}: holds no pairs; give it receipts of overhead") from error
        for layer in Layer:
            rows = [
                [np.log((half.seconds - half.control_s) / half.tokens) for half in (pair.first, pair.second)]
                for pair in pairs
                if pair.layer is layer
            ]
            if rows:
                found.setdefault(layer, []).append(np.array(rows) - np.mean(rows))
    halves = {layer: np.concatenate(parts) for layer, parts in found.items()}
    if len(halves.get(Layer.PATH, ())) < 64:
        raise UserError("these files hold fewer than 64 pairs of the path: too few to draw from")
    return halves


def gate_of(
    noise: Noise, launches: int, pairs: int, theta: float, seed: int, between: float = 0.0
) -> Judgement:
    """Judge one made-up gate of so many launches, each of so many pairs.

    Args:
        theta: true loss of head, log units.
        between: standard deviation of what a launch adds to all of its pairs.
    """
    rng = np.random.default_rng([seed, 2])
    means = [
        float((noise(rng, Layer.PATH, pairs) @ (1.0, -1.0)).mean()) + theta + between * rng.normal()
        for _ in range(launches)
    ]
    found = Sample(Layer.PATH, ("head",), np.array(means), np.ones((launches, 1)))
    estimate = total([redraw(found, seed, exact=True)], "head", 1.0)
    return judge_gate(estimate, 1.0, minutes=1.0, launches=launches, added=CLEAN)


def gate_rows(noise: Noise, launches: int, pairs: int, runs: int, seed: int) -> list[list[str]]:
    """A row for each true loss: half-width, and how often it was called what."""
    rows = []
    for percent in COSTS:
        theta, said, widths, held = log_ratio(percent), [], [], np.zeros(2)
        for run in range(runs):
            cost = gate_of(noise, launches, pairs, theta, seed * runs + run).all
            assert cost is not None
            assert cost.estimate is not None
            said.append(cost.verdict)
            widths.append((cost.estimate.high - cost.estimate.low) / 2)
            held += (cost.estimate.low <= percent + 1e-9, cost.estimate.high >= percent - 1e-9)
        red = said.count(Verdict.OVER) + said.count(Verdict.SLOWER)
        shares = (said.count(Verdict.OVER), red, said.count(Verdict.WITHIN), *held)
        rows.append(
            [
                f"{launches} x {pairs}",
                f"{percent:g}%",
                f"{np.median(widths):.2f}%",
                *(f"{100 * count / runs:.1f}%" for count in shares),
            ]
        )
    return rows


GATE_HEADERS: Final = (
    "launches x pairs",
    "true loss",
    "half-width",
    "over",
    "over or slower",
    "within",
    "L holds",
    "U holds",
)


@dataclass(slots=True)
class Tally:
    """What was said of runs of one true cost.

    Attributes:
        found: all together called over or slower. `blamed`: the collector that has the cost, likewise.
        wrong: runs that called another collector over or slower.
        low_holds, high_holds: bounds of all together on the right side of the truth.
    """

    runs: int = 0
    alarms: int = 0
    within: int = 0
    found: int = 0
    blamed: int = 0
    wrong: int = 0
    low_holds: int = 0
    high_holds: int = 0
    halves: list[float] = field(default_factory=list)
    collector_halves: list[float] = field(default_factory=list)

    def add(self, judged: Judgement, costs: Mapping[str, Cost]) -> None:
        assert judged.all is not None
        all_, red = judged.all.estimate, (Verdict.OVER, Verdict.SLOWER)
        assert all_ is not None, judged.reasons
        truth = slowdown_percent(sum(cost.theta for cost in costs.values()))
        dear = [cost for cost in judged.collectors if cost.name in costs]
        cheap = [cost for cost in judged.collectors if cost.name not in costs]
        self.runs += 1
        self.alarms += judged.exit_code is ExitCode.OVER
        self.within += judged.exit_code is ExitCode.WITHIN
        self.found += judged.all.verdict in red or (judged.all.verdict is Verdict.WITHIN and all_.low > 0)
        self.blamed += any(cost.verdict in red for cost in dear)
        self.wrong += any(cost.verdict in red for cost in cheap)
        self.low_holds += all_.low <= truth
        self.high_holds += all_.high >= truth
        self.halves.append((all_.high - all_.low) / 2)
        self.collector_halves += [
            (cost.estimate.high - cost.estimate.low) / 2 for cost in judged.collectors if cost.estimate
        ]

    def row(self, label: Sequence[str]) -> list[str]:
        low, high = binomtest(self.alarms, self.runs).proportion_ci(0.95, "exact")
        shares = (self.found, self.within, self.blamed, self.wrong, self.low_holds, self.high_holds)
        return [
            *label,
            f"{np.median(self.halves):.2f}%",
            f"{np.median(self.collector_halves):.2f}%",
            f"{100 * self.alarms / self.runs:.1f}% ({100 * low:.1f} to {100 * high:.1f})",
            *(f"{100 * count / self.runs:.1f}%" for count in shares),
        ]


HEADERS: Final = (
    "minutes",
    "true cost",
    "falls on",
    "half-width: all",
    "a collector",
    "exit 1",
    "all: L > 0",
    "exit 0",
    "named",
    "another named",
    "L holds",
    "U holds",
)


def scenarios() -> list[tuple[str, str, dict[str, Cost]]]:
    """(true cost, where it falls, costs by collector) of each row."""
    dense = [
        (f"{percent:g}%", "path" if percent else "-", {"batch": Cost(log_ratio(percent))} if percent else {})
        for percent in COSTS
    ]
    two = log_ratio(2.0)
    return [
        *dense,
        ("2%", "ticks", {"batch": Cost(two, Layer.TICK)}),
        ("2%", "flushes", {"batch": Cost(two, Layer.FLUSH)}),
        ("2%", "one half in 20", {"batch": Cost(two, one_in=20)}),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.selfcheck.pair_runs", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="RECEIPT", help="receipts of overhead")
    parser.add_argument("--minutes", type=float, nargs="+", default=[4.0], help="of pairs (default 4)")
    parser.add_argument("--runs", type=int, default=2000, help="runs in each row (default 2000)")
    parser.add_argument("--together", type=float, default=TOGETHER, help="share of pairs of all against none")
    parser.add_argument("--rows", type=int, default=None, help="only so many of the rows")
    parser.add_argument(
        "--gate", type=int, nargs=2, metavar=("LAUNCHES", "PAIRS"), help="gates instead, of so many launches"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        noise = stretches(stored_halves(options.files)) if options.files else made_up()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.gate:
        launches, pairs = options.gate
        gates = gate_rows(noise, launches, pairs, options.runs, options.seed)
        print(tabulate(gates, GATE_HEADERS, tablefmt="github", disable_numparse=True))
        return 0
    rows = []
    for minutes in options.minutes:
        session = Session(minutes, together=options.together)
        for cost, where, costs in scenarios()[: options.rows]:
            tally = Tally()
            for run in range(options.runs):
                tally.add(run_of(noise, session, costs, options.seed * options.runs + run), costs)
            rows.append(tally.row([f"{minutes:g}", cost, where]))
    print(tabulate(rows, HEADERS, tablefmt="github", disable_numparse=True))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
