"""report.html: one file that needs nothing else, in light and dark. The verdict first, then why.

matplotlib draws the charts as SVG, which stands in the page in the page's colours. Each dot says what it is.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.etree import ElementTree

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from steptime.records.costs import Estimate
from steptime.records.pairs import CONTROL, PLACEBO, Segment
from steptime.records.receipt import Receipt
from steptime.records.types import OFF, ExactCounts
from steptime.report import formatting, markdown, terminal
from steptime.timeline import svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "paper": ("#fbfaf7", "#15181c"),
    "card": ("#ffffff", "#1d2126"),
    "ink": ("#1d2329", "#e8e6e1"),
    "soft": ("#5c6670", "#a0a8b0"),
    "line": ("#dcd9d1", "#363c44"),
    "grid": ("#e9e6df", "#2b3037"),
    "within": ("#1f7a45", "#58c787"),
    "over": ("#b3261e", "#ff8a80"),
    "slower": ("#a35c00", "#ffb45c"),
    "unresolved": ("#8a6100", "#e8c060"),
    "invalid": ("#7b3fa0", "#d3a4f0"),
    "off": ("#2563a8", "#7db4f0"),
    "all": ("#c2410c", "#ff9a66"),
    "other": ("#b4b0a6", "#5f666e"),
}
"""Light and dark, of the page and its charts. A chart is drawn in light, then names replace the values."""
_SVG = "{http://www.w3.org/2000/svg}"
_WIDTH_IN = 10.5
_ROW_IN = 0.32


class Dot(NamedTuple):
    """One point of a chart; `title` is what it says when pointed at."""

    x: float
    y: float
    group: str
    title: str


class Row(NamedTuple):
    """One interval of the first chart."""

    name: str
    found: Estimate
    verdict: str


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
        counts=count_rows(receipt),
        places=markdown.differing_places(receipt),
        state=formatting.state(receipt.before, receipt.after),
        versions=receipt.machine.versions,
        costs=formatting.all_costs(receipt),
        placebo=receipt.placebo,
        lengths=formatting.lengths(receipt),
        history=history_chart(receipt, history),
        rounds=round_pictures(receipt),
        words=formatting,
        colours=COLOURS,
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


def interval_rows(receipt: Receipt) -> list[Row]:
    """Every interval in the order of the reports; empty when nothing was measured."""
    rows = [
        Row(cost.name, cost.estimate, cost.verdict.value)
        for cost in formatting.all_costs(receipt)
        if cost.estimate is not None
    ]
    if receipt.placebo is not None and receipt.placebo.estimate is not None:
        rows.append(Row(PLACEBO, receipt.placebo.estimate, "none"))
    return rows


def interval_chart(receipt: Receipt) -> Markup | None:
    """Every interval against zero and its budget; None when nothing was measured."""
    rows = interval_rows(receipt)
    if not rows:
        return None

    def draw(axes: Axes) -> None:
        places = range(len(rows))
        tones = [COLOURS.get(row.verdict, COLOURS["soft"])[0] for row in rows]
        axes.axvline(0, color=COLOURS["soft"][0], linewidth=1)
        each = () if receipt.command == "gate" else (receipt.collector_budget_percent,)
        for budget in (receipt.budget_percent, *each):
            axes.axvline(budget, color=COLOURS["over"][0], linewidth=1, linestyle=(0, (4, 3)))
        for place, (row, tone) in enumerate(zip(rows, tones, strict=True)):
            axes.hlines(place, row.found.low, row.found.high, tone, linewidth=3)
            axes.plot(row.found.percent, place, "o", markersize=7, color=tone, mec=COLOURS["card"][0])
        axes.set_yticks(places, [row.name for row in rows])
        values = axes.secondary_yaxis("right")
        values.set_yticks(places, [formatting.estimate(row.found) for row in rows])
        for label, tone in zip(values.get_yticklabels(), tones, strict=True):
            label.set_color(tone)
        for frame in (*axes.spines.values(), *values.spines.values()):
            frame.set_visible(False)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.xaxis.set_major_formatter("{x:g}%")

    return _svg("intervals", 0.4 + _ROW_IN * len(rows), draw)


def _dots(name: str, height: float, dots: list[Dot], ticks: Mapping[float, str], unit: str = "") -> Markup:
    """A chart of dots, `height` inches high. `ticks`: the x axis' labels by place."""

    def draw(axes: Axes) -> None:
        edge: Any = {"mec": COLOURS["card"][0], "mew": 0.6}
        for group in ("other", "off", "all"):
            of_group = [dot for dot in dots if dot.group == group]
            xs, ys = [dot.x for dot in of_group], [dot.y for dot in of_group]
            axes.plot(xs, ys, "o", gid=group, color=COLOURS[group][0], markersize=5.5, **edge)
        axes.set_xticks([*ticks], [*ticks.values()])
        axes.margins(x=0.01, y=0.15)
        axes.locator_params(axis="y", nbins=5)
        axes.yaxis.set_major_formatter("{x:,.10g}" + unit)
        axes.grid(axis="y")

    return _svg(name, height, draw, dots)


def segment_chart(receipt: Receipt) -> Markup | None:
    """Every segment of the path in the order taken: how much slower than the median one of its group of
    batches, percent."""
    found = [segment for segment in formatting.segments(receipt) if segment.tokens and segment.seconds > 0]
    if len(found) < 2:
        return None
    speeds = [segment.seconds / segment.tokens for segment in found]
    by_group: dict[int, list[float]] = {}
    for segment, speed in zip(found, speeds, strict=True):
        by_group.setdefault(segment.group, []).append(speed)
    middle = {group: median(members) for group, members in by_group.items()}
    values = [100.0 * (v / middle[segment.group] - 1.0) for segment, v in zip(found, speeds, strict=True)]
    # A few stalls must not press everything else flat: the axis covers 96 of 100, the others sit on its edge.
    ranked = sorted(values)
    low, high = ranked[int(0.02 * len(ranked))], ranked[min(len(ranked) - 1, int(0.98 * len(ranked)))]
    low, high = low - 0.1 * (high - low + 1), high + 0.1 * (high - low + 1)
    everything = set().union(*(segment.on for segment in found)) - {PLACEBO, CONTROL}
    dots = [
        Dot(
            place,
            min(high, max(low, value)),
            group_of(segment, everything),
            _segment_title(segment, place, value),
        )
        for place, (segment, value) in enumerate(zip(found, values, strict=True))
    ]
    ticks: dict[float, str] = {place: f"pair {place // 2 + 1}" for place in range(0, len(found), 2)}
    return _dots("segments", 3.0, dots, _some(ticks, 8), "%")


def _some(ticks: Mapping[float, str], most: int) -> dict[float, str]:
    """At most `most` of the ticks, evenly."""
    return dict([*ticks.items()][:: -(-len(ticks) // most)])


def _segment_title(segment: Segment, place: int, value: float) -> str:
    on = ", ".join(segment.on) or "nothing"
    rate = formatting.rate(segment.tokens / segment.seconds)
    return f"pair {place // 2 + 1}, {on} on: {value:+.2f}%, {rate} tok/s"


def group_of(segment: Segment, everything: set[str]) -> str:
    """The three groups that the charts tell apart."""
    on = set(segment.on) - {PLACEBO}
    return "off" if not on else "all" if on == everything else "other"


def count_rows(receipt: Receipt) -> list[tuple[str, ExactCounts, list[str]]]:
    """(what is on, counts, difference from all off for each kind) in the order counted."""
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


def history_chart(receipt: Receipt, history: Sequence[tuple[str, float]]) -> Markup | None:
    """Throughput of the stored sessions, and of this run at the right end."""
    if not history or receipt.throughput is None:
        return None
    points = [*history, (receipt.created, receipt.throughput.tokens_per_second)]
    said = [f"{date}: {formatting.rate(value)} tok/s" for date, value in points]
    dots = [Dot(place, value, "off", said[place]) for place, (_, value) in enumerate(points)]
    dots[-1] = dots[-1]._replace(group="all", title=f"this run: {formatting.rate(points[-1][1])} tok/s")
    ticks: dict[float, str] = {place: date[:10] for place, (date, _) in enumerate(points)}
    return _dots("history", 2.2, dots, _some(ticks, 6))


LOOK = svg.Look(
    paper="",
    ink="var(--ink)",
    soft="var(--soft)",
    band="var(--grid)",
    wait="var(--line)",
    depth="var(--line)",
    edge="var(--soft)",
)
"""Of the timelines, by the page's colours."""


def round_pictures(receipt: Receipt) -> list[tuple[str, Markup]]:
    """(what was on, its round as an SVG), all to one scale; empty where nothing was recorded."""
    if receipt.rounds is None:
        return []
    pictures = receipt.rounds.pictures
    longest_ns = max((one.end_ns - one.begin_ns for one in pictures.values()), default=0)
    drawn = []
    for name, one in pictures.items():
        title = f"{name}: {len(one.steps)} steps, {(one.end_ns - one.begin_ns) / 1e6:,.0f} ms"
        text = svg.draw(one, title, receipt.rounds.colours, LOOK, length_ns=longest_ns)
        drawn.append((title, Markup(text)))
    return drawn


def _svg(name: str, height_in: float, draw: Callable[[Axes], None], dots: Sequence[Dot] = ()) -> Markup:
    """What `draw` draws, as an SVG to stand in the page. `name` keeps the ids of a page's charts apart."""
    # matplotlib takes half a second to import, and most commands write no page.
    import matplotlib
    from matplotlib.figure import Figure

    soft, line, grid = (COLOURS[colour][0] for colour in ("soft", "line", "grid"))
    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "text.parse_math": False,
        "font.family": "sans-serif",
        "font.sans-serif": "DejaVu Sans",
        "font.size": 10,
        "axes.formatter.useoffset": False,
        "axes.axisbelow": True,
        "axes.edgecolor": line,
        "grid.color": grid,
    }
    settings |= dict.fromkeys(("text.color", "xtick.color", "ytick.color"), soft)
    settings |= dict.fromkeys(("xtick.major.size", "ytick.major.size"), 0)
    with matplotlib.rc_context(settings):
        figure = Figure((_WIDTH_IN, height_in), layout="constrained")
        draw(figure.subplots())
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(file.getvalue())
    for group in {dot.group for dot in dots}:
        drawn = root.iterfind(f".//{_SVG}g[@id='{group}']//{_SVG}use")
        for dot, element in zip([dot for dot in dots if dot.group == group], drawn, strict=True):
            element.set("class", "dot")
            ElementTree.SubElement(element, f"{_SVG}title").text = dot.title
    # The page gives the size. Groups are numbered alike in every chart. Nothing lies outside the axes.
    del root.attrib["width"], root.attrib["height"]
    for element in [*root.iter()]:
        element.attrib.pop("clip-path", None)
        if element.tag == f"{_SVG}g":
            element.attrib.pop("id", None)
        for child in [*element]:
            if child.tag.rpartition("}")[2] in ("metadata", "style", "clipPath"):
                element.remove(child)
    ElementTree.register_namespace("", _SVG.strip("{}"))
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    text = ElementTree.tostring(root, encoding="unicode")
    for colour, (light, _) in COLOURS.items():
        text = text.replace(light, f"var(--{colour})")
    return Markup(text)
