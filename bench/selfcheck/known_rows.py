"""What runs with known costs found, one JSON line for each switch of a run: added to over days, shown as one
table. A row that missed stays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError
from tabulate import tabulate

from steptime.errors import UserError
from steptime.records.costs import Estimate
from steptime.records.pairs import Layer
from steptime.records.strict_json import explain
from steptime.records.types import STRICT
from steptime.report import formatting

HEADERS: Final = (
    "subject",
    "run",
    "switch",
    "truth",
    "estimate [90%]",
    "path %",
    "tick ms",
    "flush ms",
    "off by",
    "",
)
WHERE: Final = {Layer.PATH: "%, path", Layer.TICK: "%, ticks", Layer.FLUSH: "%, flushes", None: ""}


@dataclass(frozen=True, slots=True)
class Found:
    """One switch, its true cost beside what was found.

    Attributes:
        truth: as asked for, percent of every step, or of the time between two ticks or flushes, by the layer
            that it falls on.
        truth_percent: that of the throughput, by which it is judged.
        limit: half-intervals that an estimate may be off.
        least_percent: the truth is only known to lie between this and `truth_percent`; None: it is known.
    """

    __pydantic_config__ = STRICT

    name: str
    layer: Layer | None
    truth: float
    truth_percent: float
    estimate: Estimate | None
    limit: float
    least_percent: float | None = None

    @property
    def off_by(self) -> float | None:
        """Estimate less the truth over the half of the interval that lies towards the truth: inside it up to
        1 or -1."""
        found = self.estimate
        if found is None:
            return None
        least = self.truth_percent if self.least_percent is None else self.least_percent
        error = found.percent - min(max(found.percent, least), self.truth_percent)
        half = found.percent - found.low if error > 0 else found.high - found.percent
        return error / half if half > 0 else 0.0 if error == 0 else float("inf")

    @property
    def right(self) -> bool:
        """Measured, within the bounds that all rows keep together, and what must cost something told from
        nothing."""
        if self.estimate is None or self.off_by is None or abs(self.off_by) > self.limit:
            return False
        return self.layer is None or self.least_percent == 0.0 or self.estimate.low > 0

    @property
    def truth_in_words(self) -> str:
        """`2%, ticks`, `0 to 5%, path`."""
        start = "" if self.least_percent is None else f"{self.least_percent:g} to "
        return f"{start}{self.truth:g}{WHERE[self.layer]}"


@dataclass(frozen=True, slots=True)
class KnownRow:
    """A row as it is kept.

    Attributes:
        case: the run, by what was in it.
        unfit: why the machine was unfit, one line each.
        created: UTC, ISO 8601; with seed and case it names the run.
    """

    __pydantic_config__ = STRICT

    subject: str
    case: str
    seed: int
    minutes: float
    created: str
    commit: str
    machine: str
    unfit: tuple[str, ...]
    found: Found


def append(path: Path, rows: Iterable[KnownRow]) -> None:
    """Add the rows of one run."""
    with path.open("ab") as file:
        for row in rows:
            file.write(_ADAPTER.dump_json(row) + b"\n")


def read(path: Path) -> list[KnownRow]:
    """Every row of a file; none where there is no file.

    Raises:
        UserError: naming file and line.
    """
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}; want the rows of known_costs") from None
    for number, line in enumerate(lines, 1):
        try:
            found.append(_ADAPTER.validate_json(line))
        except ValidationError as error:
            raise UserError(f"{path}:{number}: {explain(error)}; want a row of known_costs") from None
    return found


def runs_of(rows: Sequence[KnownRow], subject: str, case: str) -> int:
    """How many runs of that kind are kept."""
    return len({row.created for row in rows if (row.subject, row.case) == (subject, case)})


def table(rows: Sequence[KnownRow]) -> str:
    """Every known cost beside its truth, one line for each run; what costs nothing is counted below them, and
    each one that missed is shown. "off by" is in halves of the interval."""
    shown = [row for row in rows if row.found.layer is not None or not row.found.right]
    measured = [row for row in rows if row.found.estimate is not None]
    free = [row for row in measured if row.found.layer is None]
    inside = sum(_holds(row.found) for row in free)
    known = [row for row in measured if row.found.layer is not None]
    lines = [
        tabulate([_cells(row) for row in shown], HEADERS, tablefmt="github", disable_numparse=True),
        "",
        f"{sum(_holds(row.found) for row in known)} of {len(known)} intervals (90%) of known costs hold the "
        f"truth, {inside} of {len(free)} of what costs nothing hold 0.",
    ]
    states: dict[str, set[tuple[str, str, str]]] = {}
    for row in rows:
        key = f"{row.machine}, commit {row.commit}: " + ("; ".join(row.unfit) or "fit")
        states[key] = states.get(key, set()) | {(row.subject, row.case, row.created)}
    return "\n".join([*lines, *(f"{len(runs)} runs on {state}." for state, runs in states.items())])


def _holds(found: Found) -> bool:
    return found.off_by is not None and abs(found.off_by) <= 1.0


def _cells(row: KnownRow) -> list[str]:
    found = row.found
    return [
        row.subject,
        row.case,
        found.name,
        found.truth_in_words,
        "-" if found.estimate is None else formatting.estimate(found.estimate),
        *formatting.layers(found.estimate),
        "-" if found.off_by is None else f"{found.off_by:+.1f}",
        ""
        if found.right
        else "WRONG"
        if found.estimate is None or abs(found.off_by or 0.0) > found.limit
        else "unseen",
    ]


_ADAPTER: Final = TypeAdapter(KnownRow)
