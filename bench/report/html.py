"""report.html: one file that needs nothing else, in light and dark, wide and narrow. The verdict first, then
why.

Charts are inline SVG whose places are percentages of the width, so that text keeps its size on any screen.
Here receipts become places and texts; the template only lays them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from bench.records.receipt import Receipt
from bench.records.types import ALL, OFF, OFF_AGAIN, ExactCounts, Interval, Segment
from bench.report import formatting, markdown, terminal

MARGIN = 1.08
"""A chart reaches this much beyond what it shows."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A labelled place on an axis, percent of its length."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One interval: name, text, verdict, and the places of low, estimate and high, percent of the width."""

    name: str
    kind: str
    text: str
    verdict: str
    low: float
    at: float
    high: float


@dataclass(frozen=True, slots=True)
class Dot:
    """One point of a chart, percent from the left and from the top."""

    x: float
    y: float
    group: str
    title: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Dots with both axes; lines are (y, label) across the whole width."""

    dots: tuple[Dot, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


@dataclass(frozen=True, slots=True)
class Intervals:
    """The bars with their common axis; `zero` and `budgets` are places on it."""

    bars: tuple[Bar, ...]
    ticks: tuple[Tick, ...]
    zero: float
    budgets: tuple[Tick, ...]


class Axis:
    """Maps values to percent of a length, and finds round places for ticks."""

    def __init__(self, low: float, high: float) -> None:
        if high <= low:
            low, high = low - 1.0, high + 1.0
        self.low, self.high = low, high

    def at(self, value: float) -> float:
        """Percent of the length, kept inside it."""
        return round(min(100.0, max(0.0, 100.0 * (value - self.low) / (self.high - self.low))), 3)

    def ticks(self, unit: str = "", most: int = 7) -> tuple[Tick, ...]:
        """About `most` round values in the range, at least two."""
        span = self.high - self.low
        steps = (m * 10.0**e for e in range(-6, 7) for m in (1.0, 2.0, 5.0))
        step = next(step for step in steps if span / step <= most)
        first = int(self.low / step) - 1
        values = [step * k for k in range(first, first + most + 4) if self.low <= step * k <= self.high]
        digits = max(0, next(d for d in range(7) if abs(round(step, d) - step) < 1e-9))
        return tuple(Tick(self.at(value), formatting.number(value, digits) + unit) for value in values)


def render(receipt: Receipt, history: Sequence[tuple[str, float]] = ()) -> str:
    """The whole page.

    Args:
        history: (date, tokens/s) of the stored sessions of this machine and config, oldest first.
    """
    return _template().render(
        receipt=receipt,
        verdict=receipt.verdict.value,
        headline=formatting.headline(receipt),
        meaning=formatting.EXIT_MEANING[receipt.exit_code],
        machine=formatting.machine(receipt),
        commit=formatting.commit(receipt),
        facts=terminal.facts(receipt),
        intervals=interval_chart(receipt),
        segments=segment_chart(receipt),
        losses=loss_chart(receipt),
        counts=count_rows(receipt),
        places=markdown.differing_places(receipt),
        state=formatting.state(receipt.before, receipt.after),
        versions=receipt.machine.versions,
        costs=formatting.all_costs(receipt),
        marginal=formatting.has_marginal(receipt),
        history=history_chart(receipt, history),
        words=formatting,
        options={name: value for name, value in receipt.options.items() if value not in (None, "", False)},
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["capitalize_first"] = lambda text: text[:1].upper() + text[1:]
    return environment.get_template("report.html.j2")


def interval_chart(receipt: Receipt) -> Intervals | None:
    """Every interval against zero and its budget; None when nothing was measured."""
    rows: list[tuple[str, str, Interval, str]] = []
    kinds = {ALL: "together", "head": "against base"}
    for cost in formatting.all_costs(receipt):
        if cost.isolated is not None:
            rows.append((cost.name, kinds.get(cost.name, "isolated"), cost.isolated, cost.verdict.value))
        if cost.marginal is not None and cost.name not in kinds:
            rows.append((cost.name, "marginal", cost.marginal, cost.verdict.value))
    if receipt.aa is not None:
        rows.append(("A/A", "off again", receipt.aa, "none"))
    if not rows:
        return None
    reach = [
        receipt.budget_percent,
        0.0,
        *(value for _, _, found, _ in rows for value in (found.low, found.high)),
    ]
    middle, half = (max(reach) + min(reach)) / 2, (max(reach) - min(reach)) / 2 * MARGIN
    axis = Axis(middle - half, middle + half)
    bars = tuple(
        Bar(
            name,
            kind,
            formatting.interval(found),
            verdict,
            axis.at(found.low),
            axis.at(found.percent),
            axis.at(found.high),
        )
        for name, kind, found, verdict in rows
    )
    budgets = {receipt.budget_percent: "budget of all"}
    if receipt.command != "gate":
        budgets[receipt.collector_budget_percent] = "of each"
    marks = tuple(Tick(axis.at(value), label) for value, label in budgets.items())
    return Intervals(bars, axis.ticks("%"), axis.at(0.0), marks)


def segment_chart(receipt: Receipt) -> Chart | None:
    """Every segment in the order taken: how much slower than the median one, percent."""
    found = [segment for segment in formatting.segments(receipt) if segment.tokens and segment.seconds > 0]
    if len(found) < 2:
        return None
    speeds = [segment.seconds / segment.tokens for segment in found]
    middle = median(speeds)
    values = [100.0 * (speed / middle - 1.0) for speed in speeds]
    # A few stalls must not press everything else flat: the axis covers 96 of 100, the others sit on its edge.
    ranked = sorted(values)
    low, high = ranked[int(0.02 * len(ranked))], ranked[min(len(ranked) - 1, int(0.98 * len(ranked)))]
    axis, across = (
        Axis(low - 0.1 * (high - low + 1), high + 0.1 * (high - low + 1)),
        Axis(-0.5, len(found) - 0.5),
    )
    dots = tuple(
        Dot(
            across.at(place),
            round(100.0 - axis.at(value), 3),
            group_of(segment.arm),
            _segment_title(segment, value),
        )
        for place, (segment, value) in enumerate(zip(found, values, strict=True))
    )
    return Chart(dots, _round_ticks(found, across), _turned(axis.ticks("%", 5)))


def _segment_title(segment: Segment, value: float) -> str:
    where = f"round {segment.round + 1}" + (f", process {segment.process + 1}" if segment.process else "")
    return f"{segment.arm}, {where}: {value:+.2f}%, {formatting.rate(segment.tokens / segment.seconds)} tok/s"


def _round_ticks(segments: Sequence[Segment], across: Axis) -> tuple[Tick, ...]:
    firsts: dict[tuple[int, int], int] = {}
    for place, segment in enumerate(segments):
        firsts.setdefault((segment.process, segment.round), place)
    every = max(1, -(-len(firsts) // 8))
    return tuple(
        Tick(across.at(place), f"round {number + 1}")
        for number, place in enumerate(firsts.values())
        if number % every == 0
    )


def _turned(ticks: tuple[Tick, ...]) -> tuple[Tick, ...]:
    """From the bottom up."""
    return tuple(Tick(round(100.0 - tick.at, 3), tick.label) for tick in ticks)


def group_of(arm: str) -> str:
    """The four groups that the charts tell apart."""
    return {OFF: "off", "base": "off", ALL: "all", "head": "all", OFF_AGAIN: "again"}.get(arm, "other")


def loss_chart(receipt: Receipt) -> Chart | None:
    """Losses of every arm over the cycle's batches: equal ones lie on top of each other."""
    values = [value for losses in receipt.losses.values() for value in losses]
    if not values:
        return None
    low, high = min(values), max(values)
    axis = Axis(low - 0.15 * (high - low), high + 0.15 * (high - low))
    length = max(len(losses) for losses in receipt.losses.values())
    across = Axis(-0.5, length - 0.5)
    dots = tuple(
        Dot(
            across.at(place),
            round(100.0 - axis.at(value), 3),
            group_of(arm),
            f"{arm}, batch {place}: {value!r}",
        )
        for arm, losses in receipt.losses.items()
        for place, value in enumerate(losses)
    )
    every = max(1, -(-length // 16))
    x_ticks = tuple(Tick(across.at(place), str(place)) for place in range(0, length, every))
    return Chart(dots, x_ticks, _turned(axis.ticks("", 5)))


def count_rows(receipt: Receipt) -> list[tuple[str, ExactCounts, list[str]]]:
    """(arm, counts, difference from `off` for each kind) in the order counted."""
    off = receipt.counts.get(OFF) or receipt.counts.get("base")
    rows = []
    for arm, counts in receipt.counts.items():
        added = []
        for kind in formatting.KINDS:
            here, there = getattr(counts, kind), getattr(off, kind) if off is not None else None
            added.append(
                "" if here is None or there is None or counts is off else formatting.added(here - there)
            )
        rows.append((arm, counts, added))
    return rows


def history_chart(receipt: Receipt, history: Sequence[tuple[str, float]]) -> Chart | None:
    """Throughput of the stored sessions, and of this run at the right end."""
    if not history or receipt.throughput is None:
        return None
    points = [*history, (receipt.created, receipt.throughput.tokens_per_second)]
    values = [value for _, value in points]
    spread = max(values) - min(values) or 0.02 * max(values)
    axis, across = Axis(min(values) - 0.2 * spread, max(values) + 0.2 * spread), Axis(-0.5, len(points) - 0.5)
    last = len(points) - 1
    dots = tuple(
        Dot(
            across.at(place),
            round(100.0 - axis.at(value), 3),
            "all" if place == last else "off",
            f"{'this run' if place == last else date}: {formatting.rate(value)} tok/s",
        )
        for place, (date, value) in enumerate(points)
    )
    every = max(1, -(-len(points) // 6))
    x_ticks = tuple(
        Tick(across.at(place), date[:10]) for place, (date, _) in enumerate(points) if place % every == 0
    )
    return Chart(dots, x_ticks, _turned(axis.ticks("", 5)))
