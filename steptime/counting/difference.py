"""Pure: two sets of counts in, only their differences out, as rows and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from steptime.syncs.scopes import WORK, Place

Counts = dict[tuple[str, str, Place], int]
"""(role, kind, place) -> number of events."""
CountMap = Mapping[tuple[str, str, Place], int]


class CountRow(NamedTuple):
    """One place whose count differs."""

    role: str
    kind: str
    place: Place
    off: int
    on: int


def difference(off: CountMap, on: CountMap) -> list[CountRow]:
    """Rows whose counts differ: syncs before device work, then by role and place."""
    rows = [
        CountRow(role, kind, place, off.get((role, kind, place), 0), on.get((role, kind, place), 0))
        for role, kind, place in {*off, *on}
        if off.get((role, kind, place), 0) != on.get((role, kind, place), 0)
    ]
    return sorted(rows, key=lambda row: (row.kind in WORK, row.role, row.place, row.kind))


def table(rows: Sequence[CountRow], tablefmt: str = "simple") -> str:
    """Role, kind, file:line, function, off, on; a sentence when nothing differs."""
    if not rows:
        return "no difference: the same syncs and the same device work, off and on"
    from tabulate import tabulate  # Here: a test's fixture counts without it.

    body = [(row.role, row.kind, row.place.where, row.place.function, row.off, row.on) for row in rows]
    return tabulate(body, headers=("role", "kind", "file:line", "function", "off", "on"), tablefmt=tablefmt)


def counts_table(counts: CountMap, steps: int = 0, tablefmt: str = "simple", *, work: bool = False) -> str:
    """Counts of one run, the most frequent first; per step when their number is given."""
    chosen = [(key, n) for key, n in counts.items() if work or key[1] not in WORK]
    if not chosen:
        return "no host sync"
    from tabulate import tabulate

    body = [
        (role, kind, place.where, place.function, n / steps if steps else n)
        for (role, kind, place), n in sorted(chosen, key=lambda item: (-item[1], item[0]))
    ]
    headers = ("role", "kind", "file:line", "function", "per step" if steps else "count")
    return tabulate(body, headers=headers, tablefmt=tablefmt, floatfmt="g")
