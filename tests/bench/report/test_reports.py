"""Reports of every kind of run: golden Markdown, a terminal of 80 columns, and a page that needs nothing
else.

`UPDATE_GOLDEN=1 pytest tests/bench/report/test_reports.py` writes the golden files anew; look at the
difference before it is committed."""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bench.records.receipt import Receipt
from bench.records.types import ExitCode, Verdict
from bench.report import formatting, html, markdown, terminal
from tests.bench.scenes import SCENES

GOLDEN = Path(__file__).parent / "golden"

scenes = pytest.mark.parametrize("name", SCENES)


@scenes
@pytest.mark.parametrize(("render", "suffix"), [(markdown.render, "md"), (terminal.render, "txt")])
def test_a_report_is_what_was_reviewed(name: str, render: object, suffix: str) -> None:
    text = render(SCENES[name]())  # type: ignore[operator]
    path = GOLDEN / f"{name}.{suffix}"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_scenes_are_what_they_claim() -> None:
    found = {name: (scene().verdict, scene().exit_code) for name, scene in SCENES.items()}
    assert found == {
        "within": (Verdict.WITHIN, ExitCode.WITHIN),
        "unresolved": (Verdict.UNRESOLVED, ExitCode.UNRESOLVED),
        "slower": (Verdict.SLOWER, ExitCode.UNRESOLVED),
        "over": (Verdict.OVER, ExitCode.OVER),
        "invalid": (Verdict.INVALID, ExitCode.INVALID),
        "incomplete": (Verdict.INVALID, ExitCode.INCOMPLETE),
        "gate": (Verdict.OVER, ExitCode.OVER),
        "no_base": (Verdict.INVALID, ExitCode.INCOMPLETE),
    }


@scenes
def test_receipts_survive_being_written_and_read(name: str) -> None:
    receipt = SCENES[name]()
    assert Receipt.from_json(receipt.to_json()) == receipt


@scenes
def test_the_table_fits_a_terminal_of_80_columns(name: str) -> None:
    table = terminal.cost_table(SCENES[name]())
    assert all(len(line) <= 80 for line in table.splitlines())


@scenes
def test_colours_only_where_they_are_asked_for(name: str) -> None:
    receipt = SCENES[name]()
    coloured = terminal.render(receipt, color=True)
    assert "\x1b[" in coloured
    assert "\x1b" not in terminal.render(receipt)
    assert terminal.plain(coloured) == terminal.render(receipt)


@scenes
def test_the_verdict_comes_first_in_markdown_and_last_on_a_terminal(name: str) -> None:
    receipt = SCENES[name]()
    assert receipt.verdict.value.upper() in markdown.render(receipt).splitlines()[0]
    last = terminal.render(receipt).rstrip().splitlines()[-1]
    assert last.startswith(receipt.verdict.value.upper())
    assert last.endswith(f"(exit code {int(receipt.exit_code)})")


class Page(HTMLParser):
    """Checks that tags nest, and collects what a browser would fetch."""

    VOID = frozenset({"meta", "br", "hr", "img", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.fetched: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for key, value in attrs if key in ("src", "href", "srcset")]
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for key, value in attrs if key in ("src", "href", "srcset")]

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@scenes
def test_the_page_is_whole_and_needs_nothing_else(name: str) -> None:
    receipt = SCENES[name]()
    text = html.render(receipt, history=[("2026-11-01", 14100.0), ("2026-11-15", 14180.0)])
    page = Page(text)
    assert page.stack == []
    assert page.fetched == []
    assert "<script" not in text
    assert "url(" not in text
    words_on_page = " ".join(page.text)
    assert receipt.verdict.value in words_on_page
    for reason in receipt.reasons:
        assert reason in words_on_page
    assert "prefers-color-scheme: dark" in text
    assert all(0 <= float(place) <= 100 for place in re.findall(r'(?:cx|cy|x1|x2)="([\d.-]+)%"', text))


def test_the_page_shows_every_segment_interval_loss_and_count() -> None:
    receipt = SCENES["over"]()
    text = html.render(receipt)
    total = sum(len(arm) for arm in receipt.arms.values())
    assert len(re.findall(r"<circle class=\"(?:off|all|again|other)\"", text)) == total + sum(
        map(len, receipt.losses.values())
    )
    intervals = html.interval_chart(receipt)
    assert intervals is not None
    assert [(bar.name, bar.kind) for bar in intervals.bars] == [
        ("profile", "isolated"),
        ("profile", "marginal"),
        ("pipeline", "isolated"),
        ("pipeline", "marginal"),
        ("all", "together"),
        ("A/A", "off again"),
    ]
    assert "profile.py:41 sample" in text
    assert "+8" in text


def test_markup_in_a_name_stays_text() -> None:
    from dataclasses import replace

    receipt = replace(SCENES["within"](), reasons=("<script>alert(1)</script> | `x`",))
    assert "<script" not in html.render(receipt)
    assert "<script" not in markdown.render(receipt)


@pytest.mark.parametrize(
    ("low", "high"), [(-0.3, 1.2), (-60.0, 30.0), (2.31, 2.315), (0.0, 0.0), (14000.0, 14300.0)]
)
def test_axes_have_a_few_round_ticks_in_order(low: float, high: float) -> None:
    axis = html.Axis(low, high)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 9
    places = [tick.at for tick in ticks]
    assert places == sorted(set(places))
    assert all(len(tick.label) <= 7 for tick in ticks)


def test_values_off_the_axis_sit_on_its_edge() -> None:
    axis = html.Axis(0.0, 1.0)
    assert (axis.at(-5.0), axis.at(0.25), axis.at(7.0)) == (0.0, 25.0, 100.0)


@pytest.mark.parametrize(("value", "text"), [(14200.0, "14.2K"), (1234.4, "1,234"), (87.31, "87.3")])
def test_throughputs_for_people(value: float, text: str) -> None:
    assert formatting.rate(value) == text


def test_no_number_is_a_negative_zero() -> None:
    assert formatting.number(-0.001) == "0.00"
    assert formatting.number(-0.01) == "-0.01"
