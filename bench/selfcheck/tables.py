"""The self-check's tables: on a terminal short enough for 80 columns, in Markdown with the bounds of the
other judges too."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from statistics import fmean, median

from scipy.stats import binomtest
from tabulate import tabulate

from bench.selfcheck import other_judges
from bench.selfcheck.rates import RateRow, Report
from bench.selfcheck.trials import Command
from steptime.progress import human_time

SCHEMA = "dflash-bench/selfcheck/4"
SHORT = {"pytest-benchmark mean:2%": "mean:2%", "pyperf t-test": "pyperf t", "Mann-Whitney": "M.-Whitney"}
"""Names of the other judges on a terminal."""


def share(hits: int, runs: int) -> str:
    """`57 of 60 (86-99%)`, exact (Clopper-Pearson) 95% bounds; a dash for no runs."""
    if not runs:
        return "-"
    low, high = binomtest(hits, runs).proportion_ci(0.95, "exact")
    return f"{hits} of {runs} ({100 * low:.0f}-{100 * high:.0f}%)"


def _cost(row: RateRow) -> str:
    words = row.inject.replace("@step", "").replace("@", "% ")
    words += "%" if words and "%" not in words else ""
    return f"{words} scaled" if row.scaled else words or "none"


def _signed(percent: float) -> str:
    return f"{round(percent, 2) + 0.0:+.2f}%"  # no -0.00


KIND = ["subject", "known\ncost", "min"]


def _kind(row: RateRow) -> list[str]:
    return [row.subject, _cost(row), f"{row.minutes:g}"]


RATE_HEADERS = [*KIND, "said slower\nor over", "half-\nwidth", "off\nby", "said"]


def rate_rows(rows: Sequence[RateRow], between: str) -> list[list[str]]:
    """What the runs of each kind said. half-width: median; off by: mean of estimate less truth.

    `between` stands between two verdicts: a new line keeps the table within 80 columns.
    """
    return [
        [
            *_kind(row),
            share(row.found, row.judged),
            f"{median(row.widths):.2f}%" if row.widths else "-",
            _signed(fmean(row.errors)) if row.errors else "-",
            between.join(f"{count} {verdict}" for verdict, count in sorted(row.verdicts.items())) or "-",
        ]
        for row in rows
    ]


TRUTH_HEADERS = ["of", *KIND, "interval holds\nthe truth", "another switch\nis blamed"]


def truth_rows(report: Report) -> list[list[str]]:
    """How often the interval (90%) of all together holds the truth, and how often one that costs nothing is
    called slower or over."""
    return [
        [
            row.command.value,
            *_kind(row),
            share(row.held, row.judged),
            share(row.unblamed, row.judged) if row.command is Command.OVERHEAD else "-",
        ]
        for row in report.rows
        if row.judged
    ]


def rival_rows(report: Report, *, bounds: bool) -> list[list[str]]:
    """How often each judge calls head slower: alarms where head is the same code, hits where it is slower."""
    table = []
    for row in report.rows:
        if row.judged and row.command is Command.GATE:
            hits = [row.found, *(row.rivals.get(name, 0) for name in other_judges.RIVALS)]
            table.append(
                [
                    *_kind(row),
                    *(share(hit, row.judged) if bounds else f"{hit} of {row.judged}" for hit in hits),
                ]
            )
    return table


PLANT_HEADERS = ["planted fault", "found", "by"]


def plant_rows(report: Report) -> list[list[str]]:
    """Planted faults, and what told them."""
    words = {True: "yes", False: "NO", None: "untried"}
    return [[plant.name, words[plant.found], plant.how] for plant in report.plants]


Table = tuple[str, list[list[str]], Sequence[str]]


def _tables(report: Report, *, wide: bool) -> list[Table]:
    names = [name if wide else SHORT[name] for name in other_judges.RIVALS]
    between = ", " if wide else "\n"
    titles = {
        Command.GATE: "Gates of this code against itself, exact 95% bounds",
        Command.OVERHEAD: "Runs of overhead: all together, exact 95% bounds",
    }
    rows = {command: [row for row in report.rows if row.command is command] for command in Command}
    found = [
        *((titles[command], rate_rows(rows[command], between), RATE_HEADERS) for command in Command),
        ("Is the truth inside, and who is blamed", truth_rows(report), TRUTH_HEADERS),
        (
            "Who calls head slower, the others on the same segments taken base first",
            rival_rows(report, bounds=wide),
            [*KIND, "ours", *names],
        ),
        ("Planted faults", plant_rows(report), PLANT_HEADERS),
    ]
    return [table for table in found if table[1]]


def _where(report: Report) -> str:
    commits = [f"commit {', '.join(report.commits)}"] if report.commits else []
    return "; ".join([*report.machines, human_time(report.seconds), *commits])


def _untried(report: Report) -> list[str]:
    return [f"INCOMPLETE: {text}" for text in report.untried]


def to_text(report: Report) -> str:
    """The tables for a terminal."""
    tables = _tables(report, wide=False)
    parts = [
        f"{title}\n\n{tabulate(rows, headers, disable_numparse=True)}" for title, rows, headers in tables
    ]
    return "\n\n".join([*parts, _where(report), *_untried(report)])


def to_markdown(report: Report) -> str:
    """The tables as Markdown."""
    parts = ["# Self-check of the harness", _where(report) + ".", *_untried(report)]
    for title, rows, headers in _tables(report, wide=True):
        flat = [header.replace("-\n", "-").replace("\n", " ") for header in headers]
        parts += [f"## {title}", tabulate(rows, flat, tablefmt="github", disable_numparse=True)]
    return "\n\n".join(parts) + "\n"


def to_json(report: Report) -> str:
    """Everything, for later sums over several self-checks."""
    return json.dumps({"schema": SCHEMA, **dataclasses.asdict(report)}, indent=1) + "\n"
