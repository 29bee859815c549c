"""Pure: what was counted, as text, Markdown, JSON, SARIF or GitHub annotations."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from steptime.counting.accepted import Accepted, reason_for
from steptime.counting.advice import COPIES, advice
from steptime.counting.count import SyncCount
from steptime.syncs.scopes import WORK, Place

SCHEMA = "steptime-syncs/2"
FORMATS = ("text", "markdown", "json", "sarif", "github")


@dataclass(frozen=True)
class Row:
    """A place where the host waits.

    Attributes:
        asked_by: the line of the user's own tree that asked for it.
        in_steps, at_most: in how many counted steps it was, and how often in one of them at most.
        accepted: why it may stay; None: it is new.
    """

    role: str
    kind: str
    place: Place
    asked_by: Place
    count: int
    in_steps: int
    at_most: int
    accepted: str | None

    @property
    def is_copy(self) -> bool:
        return self.kind in COPIES

    @property
    def advice(self) -> str:
        return advice(self.kind, self.place)

    def often(self, steps: int) -> str:
        return (
            f"in {self.in_steps} of {steps} steps, at most {self.at_most}" if steps else f"{self.count} times"
        )


def rows(counted: SyncCount, accepted: Sequence[Accepted] = ()) -> list[Row]:
    """Waits before copies, the most frequent first."""
    spread = counted.spread()
    found = []
    for (role, kind, place), n in counted.counts.items():
        if kind not in WORK:
            asker = counted.asked_by(role, kind, place)
            why = reason_for(kind, (place, asker), accepted)
            found.append(Row(role, kind, place, asker, n, *spread[role, kind, place], why))
    return sorted(found, key=lambda row: (row.is_copy, -row.count, row.role, row.place, row.kind))


def head(counted: SyncCount) -> str:
    """How many, and by which rules."""
    where = " (CUDA simulated)" if counted.simulated else ""
    if counted.device_unused:
        where = (
            f"\n{UNUSED}: its CPU was taken for one. Where it asks for the CPU itself\n(use_cpu=True, "
            "accelerator='cpu'), a run without that is counted more exactly"
        )
    if counted.steps:
        return (
            f"{_named(counted.total / counted.steps)} in each of {counted.steps} steps (after "
            f"{counted.warmup} of warm-up){where}"
        )
    return f"{_named(counted.total)} in the whole run, which took no optimizer step{where}"


def _named(number: float) -> str:
    return f"{number:g} host sync{'' if number == 1 else 's'}"


UNUSED = "the program put nothing on the simulated CUDA device"
"""Then its CPU was taken for the device (`ProgramBoundary`)."""


def nothing_counted(counted: SyncCount) -> str:
    """Why there are no counts, in one line; empty when there are."""
    if counted.steps or not counted.finished:
        return ""
    return (
        f"nothing was counted: all {counted.finished} optimizer steps belong to the warm-up of "
        f"{counted.warmup} (see --warmup)"
    )


def text(counted: SyncCount, found: Sequence[Row], tablefmt: str = "simple", *, work: bool = False) -> str:
    """Tables of waits and of copies, advice below; the device's work when asked for."""
    from tabulate import tabulate  # Here: a test's fixture counts without it.

    parts = [head(counted)]
    for title, copies in (("waits", False), ("copies that wait", True)):
        chosen = [row for row in found if row.is_copy == copies]
        if chosen:
            body = [
                (
                    row.role,
                    row.kind,
                    row.place.where,
                    "" if row.asked_by == row.place else row.asked_by.where,
                    row.count / counted.steps if counted.steps else row.count,
                    row.often(counted.steps),
                    row.accepted or "",
                )
                for row in chosen
            ]
            names = (
                "role",
                title,
                "where",
                "asked by",
                "per step" if counted.steps else "count",
                "when",
                "accepted",
            )
            parts.append(tabulate(body, headers=names, tablefmt=tablefmt, floatfmt="g"))
    if not found:
        parts.append("no host sync")
    told: dict[str, None] = {}
    for row in found:
        if row.accepted is None:
            told.setdefault(f"{row.kind}: {row.advice}", None)
    parts += ["\n".join(f"- {line}" for line in told)] if told else []
    if work:
        parts.append(counted.table(tablefmt, work=True))
        if counted.graphs:
            parts.append(f"{counted.graphs} compiled graphs ran; inside one only waits are seen.")
    return "\n\n".join(parts)


def as_json(counted: SyncCount, found: Sequence[Row]) -> str:
    """Schema `steptime-syncs/2`."""
    tree = {
        "schema": SCHEMA,
        "steps": counted.steps,
        "warmup": counted.warmup,
        "simulated": counted.simulated,
        "syncs": counted.total,
        "new": sum(row.count for row in found if row.accepted is None),
        "counts": [
            {
                **asdict(row),
                "place": str(row.place),
                "where": str(row.place),
                "asked_by": str(row.asked_by),
                "advice": row.advice,
            }
            for row in found
        ],
    }
    return json.dumps(tree, indent=1)


def _said(row: Row, counted: SyncCount) -> str:
    inside = "" if row.asked_by == row.place else f" at {row.place.where}"
    return f"host sync: {row.kind}{inside}, {row.often(counted.steps)}. {row.advice}"


def _relative(file: str) -> str:
    path = os.path.relpath(file)
    return file if path.startswith("..") else path


def as_github(counted: SyncCount, found: Sequence[Row]) -> str:
    """One workflow command for each new place, which marks the line in a pull request."""
    return "\n".join(
        f"::warning file={_relative(row.asked_by.file)},line={row.asked_by.line},title=host sync::"
        f"{_said(row, counted)}"
        for row in found
        if row.accepted is None
    )


def as_sarif(counted: SyncCount, found: Sequence[Row]) -> str:
    """SARIF 2.1.0: one result for each place; accepted ones are suppressed."""
    kinds = sorted({row.kind for row in found})
    results: list[dict[str, Any]] = [
        {
            "ruleId": row.kind,
            "level": "warning",
            "message": {"text": _said(row, counted)},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": _relative(row.asked_by.file).replace(os.sep, "/")},
                        "region": {"startLine": max(1, row.asked_by.line)},
                    }
                }
            ],
            "suppressions": []
            if row.accepted is None
            else [{"kind": "inSource", "justification": row.accepted}],
        }
        for row in found
    ]
    tool = {"driver": {"name": "steptime", "rules": [{"id": kind} for kind in kinds]}}
    return json.dumps(
        {
            "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
            "version": "2.1.0",
            "runs": [{"tool": tool, "results": results}],
        },
        indent=1,
    )


def rendered(format: str, counted: SyncCount, found: Sequence[Row], *, work: bool = False) -> str:
    """The report in one of `FORMATS`."""
    if format == "json":
        return as_json(counted, found)
    if format == "sarif":
        return as_sarif(counted, found)
    if format == "github":
        return as_github(counted, found)
    return text(counted, found, "github" if format == "markdown" else "simple", work=work)
