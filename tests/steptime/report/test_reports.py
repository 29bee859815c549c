"""Reports of every kind of run: golden Markdown, a terminal of 80 columns, and a page that needs nothing
else.

`UPDATE_GOLDEN=1 pytest tests/steptime/report/test_reports.py` writes the golden files anew; look at the
difference before it is committed."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from steptime.errors import UserError
from steptime.records.pairs import Layer
from steptime.records.receipt import Receipt
from steptime.records.types import ExitCode, Verdict
from steptime.report import formatting, html, markdown, terminal
from steptime.timeline.picture import Picture, Rounds, Span, Track
from tests.steptime.scenes import SCENES

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
        self.used: list[str] = []
        self.ids: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(attrs)
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(attrs)

    def _note(self, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attrs}
        self.fetched += [found[key] for key in ("src", "href", "srcset") if key in found]
        self.used += [found["xlink:href"].removeprefix("#")] if "xlink:href" in found else []
        self.ids += [found["id"]] if "id" in found else []

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.slow
@scenes
def test_the_page_is_whole_and_needs_nothing_else(name: str) -> None:
    receipt = SCENES[name]()
    text = html.render(receipt, history=[("2026-11-01", 14100.0), ("2026-11-15", 14180.0)])
    page = Page(text)
    assert page.stack == []
    assert page.fetched == []
    assert set(page.used) <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert "<script" not in text
    assert "url(" not in text
    words_on_page = " ".join(page.text)
    assert receipt.verdict.value in words_on_page
    for reason in receipt.reasons:
        assert reason in words_on_page
    assert "prefers-color-scheme: dark" in text
    assert html.render(receipt) == html.render(receipt)


@pytest.mark.slow
def test_the_page_shows_every_segment_interval_and_count() -> None:
    receipt = SCENES["over"]()
    text = html.render(receipt)
    titles = re.findall(r'class="dot"><title>(.*?)</title>', text)
    assert len(titles) == len(formatting.segments(receipt)) > 0
    assert any(title.startswith("pair 1, ") and " tok/s" in title for title in titles)
    rows = html.interval_rows(receipt)
    words = " ".join(Page(str(html.interval_chart(receipt))).text)
    assert all(row.name in words and formatting.estimate(row.found) in words for row in rows)
    assert [row.name for row in rows] == ["profile", "pipeline", "all", "placebo"]
    assert "profile.py:41 sample" in text
    assert "+8" in text


STEP = Span("step", 0, 4_000_000, 7)
WORK = Span("work <a>", 1_000_000, 3_000_000, 12)


@pytest.mark.slow
def test_the_page_shows_one_round_of_off_and_one_of_all_to_one_scale() -> None:
    off = Picture(0, 4_000_000, (Track("worker/0", (STEP, WORK)),), {}, (), (STEP,))
    slow = Picture(
        0, 8_000_000, (Track("worker/0", (STEP._replace(end_ns=8_000_000), WORK)),), {}, (), (STEP,)
    )
    receipt = replace(SCENES["within"](), rounds=Rounds({"off": off, "all": slow}, {"work <a>": "#123456"}))
    assert Receipt.from_json(receipt.to_json()) == receipt
    text = html.render(receipt)
    page = Page(text)
    assert page.stack == page.fetched == []
    words = " ".join(page.text)
    assert "off: 1 steps, 4 ms" in words
    assert "all: 1 steps, 8 ms" in words
    assert words.count("worker/0: work <a> 12, 2.00 ms") == 2
    widths = re.findall(r'width="([0-9.]+)" height="16" fill="#123456"', text)
    assert len(widths) == 2
    assert widths[0] == widths[1], "as long in both, so as wide"
    assert len(re.findall(r'height="2" fill="#777"', text)) == 2, "a span around another is a line"
    assert "Where the time goes" not in html.render(SCENES["within"]())
    assert '"rounds"' not in SCENES["within"]().to_json()


@pytest.mark.fault
@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"pictures": {}, "colors": {}}, "colors"),
        ({"pictures": {"off": {"begin_ns": 0}}}, "end_ns"),
    ],
)
def test_rounds_of_another_make_are_refused_by_name(tree: dict[str, object], said: str) -> None:
    text = SCENES["within"]().to_json()
    with pytest.raises(UserError, match=said):
        Receipt.from_json(json.dumps({**json.loads(text), "rounds": tree}))


def test_what_was_let_through_stands_before_the_reasons() -> None:
    receipt = SCENES["gate"]()
    for text, mark in ((markdown.render(receipt), "- "), (html.render(receipt), "<li>")):
        assert 0 < text.index(mark + receipt.accepted[0]) < text.index(mark + receipt.reasons[0])


def test_markup_in_a_name_stays_text() -> None:
    receipt = replace(SCENES["within"](), reasons=("<script>alert(1)</script> | `x`",))
    assert "<script" not in html.render(receipt)
    assert "<script" not in markdown.render(receipt)


def test_a_stall_sits_on_the_edge_and_presses_nothing_flat() -> None:
    receipt = SCENES["within"]()
    first = next(pair for pair in receipt.pairs if pair.layer is Layer.PATH)
    slow = replace(first, first=replace(first.first, seconds=50 * first.first.seconds))
    stalled = replace(receipt, pairs=tuple(slow if pair is first else pair for pair in receipt.pairs))
    chart = str(html.segment_chart(stalled))
    assert re.search(r"on: \+4[89]\d\d\.", chart)
    left, top, width, height = (float(value) for value in re.findall(r'viewBox="(.*?)"', chart)[0].split())
    places = [
        (float(x), float(y)) for x, y in re.findall(r'<use [^>]*x="(.*?)" y="(.*?)"[^>]*class="dot"', chart)
    ]
    assert len(places) == len(formatting.segments(receipt))
    assert all(left <= x <= left + width and top <= y <= top + height for x, y in places)
    heights = sorted(y for _, y in places)
    assert heights[-1] - heights[1] > 0.3 * height


@pytest.mark.parametrize(("value", "text"), [(14200.0, "14.2K"), (1234.4, "1,234"), (87.31, "87.3")])
def test_throughputs_for_people(value: float, text: str) -> None:
    assert formatting.rate(value) == text


def test_no_number_is_a_negative_zero() -> None:
    assert formatting.number(-0.001) == "0.00"
    assert formatting.number(-0.01) == "-0.01"


def test_a_line_that_only_moved_is_no_difference() -> None:
    old, new, other = "a.py:37 step (item())", "a.py:38 step (item())", "a.py:40 step (item())"
    moved = {("sync", "main", old): -4, ("sync", "main", new): 4}
    assert markdown.without_moved(moved) == {}
    added = {**moved, ("sync", "main", other): 4}
    assert sum(markdown.without_moved(added).values()) == 4
    assert len(markdown.without_moved(added)) == 1
    elsewhere = {("sync", "main", old): -4, ("sync", "main", "a.py:38 other (item())"): 4}
    assert markdown.without_moved(elsewhere) == elsewhere


def test_the_terminal_names_the_places_that_added_syncs() -> None:
    receipt = SCENES["over"]()
    line = "profile: drafter/0 dflash/observe/collectors/profile.py:41 sample (item()) +8"
    assert ("added at", line) in terminal.facts(receipt)
    assert not [name for name, _ in terminal.facts(SCENES["within"]()) if name == "added at"]
    (place,) = (one for one in receipt.counts["profile"].places if one.kind == "sync")
    places = [replace(place, where=f"a.py:{n} f{n} (item())", count=n) for n in range(1, 10)]
    many = {**receipt.counts, "profile": replace(receipt.counts["profile"], places=tuple(places))}
    told = formatting.added_syncs(replace(receipt, counts=many))
    assert told[0] == "profile: drafter/0 a.py:9 f9 (item()) +9"
    assert len(told) == 4
    assert told[-1] == "6 more places"
