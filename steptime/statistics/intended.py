"""Changes that are meant: losses that may differ, and counts that may rise. Pure.

Nothing here is silent: what is let through comes back as a line for the receipt and the report."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final

from steptime.errors import UserError, nearest
from steptime.records.types import STRICT, CountedPlace, ExactCounts

KINDS: Final[Mapping[str, str]] = {
    "sync": "syncs",
    "operation": "operations",
    "copy": "copies",
    "allocation": "allocations",
}
"""A place's word for a kind, and the total's."""
CLOSE_TOLERANCE: Final = 1e-3
"""Share of a loss by which `close` lets it differ: a sum in bfloat16 taken in another order stays below."""


class Numerics(enum.StrEnum):
    """How equal the losses of base and head must be."""

    SAME = "same"
    """Bit for bit."""
    CLOSE = "close"
    """Within a tolerance."""
    CHANGED = "changed"
    """Not at all, for a stated reason."""


@dataclass(frozen=True, slots=True)
class LossComparison:
    """Attributes: `refused`, a line when the losses differ more than was allowed; `accepted`, one when they
    differ and that was allowed."""

    refused: str = ""
    accepted: str = ""


def compare_losses(
    base: Sequence[float],
    head: Sequence[float],
    numerics: Numerics,
    *,
    tolerance: float = CLOSE_TOLERANCE,
    reason: str = "",
    of: str = "loss of step",
) -> LossComparison:
    """Whether two series of losses are as equal as they must be. `of`: what an element is called.

    Raises:
        ValueError: `changed` without a reason.
    """
    if numerics is Numerics.CHANGED and not reason:
        raise ValueError("numerics 'changed' needs a reason")
    if len(base) != len(head):
        return LossComparison(refused=f"{of}: base has {len(base)} values, head {len(head)}")
    differing = [i for i, (one, other) in enumerate(zip(base, head, strict=True)) if one.hex() != other.hex()]
    if not differing:
        return LossComparison()
    gaps = {i: abs(head[i] - base[i]) / max(abs(base[i]), 1e-12) for i in differing}
    worst = max(gaps, key=lambda i: gaps[i] if gaps[i] == gaps[i] else float("inf"))
    first = differing[0]
    line = f"{of} {first}: {head[first]!r} against {base[first]!r}"
    if numerics is Numerics.SAME:
        return LossComparison(refused=line)
    apart = f"{of} {worst} differs by {100 * gaps[worst]:.3g}%, the most of {len(differing)}"
    if numerics is Numerics.CHANGED:
        return LossComparison(accepted=f"losses may change ({reason}): {apart}")
    if gaps[worst] <= tolerance:
        return LossComparison(accepted=f"losses are close, not equal ({100 * tolerance:g}% allowed): {apart}")
    return LossComparison(refused=f"{apart}; {100 * tolerance:g}% is allowed")


@dataclass(frozen=True, slots=True)
class Allowance:
    """A rise of exact counts that is meant.

    Attributes:
        kind: "syncs", "operations", "copies" or "allocations".
        role: pattern of the scope, "drafter/0" or "drafter/*".
        place: pattern of `file:line function`, tried on the place with its line number and without.
        most: the rise allowed in all places that match, over the counted steps.
    """

    __pydantic_config__ = STRICT

    kind: str
    role: str
    place: str
    most: int
    reason: str

    def covers(self, rise: Rise) -> bool:
        names = (rise.where, without_line(rise.where))
        return (
            rise.kind == self.kind
            and fnmatchcase(rise.role, self.role)
            and any(fnmatchcase(name, self.place) for name in names)
        )


def parse_allowance(text: str, reason: str) -> Allowance:
    """`syncs: drafter/0 drafter_worker.py _micro_step +1`.

    Raises:
        UserError: another form, or no such kind.
    """
    found = re.fullmatch(r"\s*(\w+):\s*(\S+)\s+(.+?)\s*\+(\d+)\s*", text)
    form = "'KIND: ROLE PLACE +N', e.g. 'syncs: drafter/0 drafter_worker.py _micro_step +1'"
    if found is None:
        raise UserError(f"--allow-count {text!r}: not {form}")
    kind, role, place, most = found.groups()
    if kind not in KINDS.values():
        raise UserError(f"--allow-count {text!r}: no such kind{nearest(kind, KINDS.values())}; {form}")
    return Allowance(kind, role, place, int(most), reason)


@dataclass(frozen=True, slots=True)
class Rise:
    """More of a kind counted at a place than before. `added` is positive."""

    kind: str
    role: str
    where: str
    added: int


@dataclass(frozen=True, slots=True)
class Rises:
    """Attributes: `left` by kind, what no allowance covers; `accepted`, a line for each allowance that was
    used; `unused`, one for each that was not."""

    left: dict[str, int] = field(default_factory=dict)
    accepted: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


def without_line(where: str) -> str:
    """`file.py function` of `file.py:31 function`: lines move whenever something above them changes."""
    return re.sub(r":\d+(?= |$)", "", where)


def rises_by_place(before: ExactCounts, after: ExactCounts) -> tuple[Rise, ...]:
    """Where more was counted, the largest rise first. Places are told apart by file and function."""

    def by_place(places: Iterable[CountedPlace]) -> dict[tuple[str, str, str], list[CountedPlace]]:
        found: dict[tuple[str, str, str], list[CountedPlace]] = {}
        for place in places:
            key = (KINDS.get(place.kind, place.kind), place.role, without_line(place.where))
            found.setdefault(key, []).append(place)
        return found

    old = by_place(before.places)
    rises = []
    for (kind, role, where), places in by_place(after.places).items():
        gone = sum(place.count for place in old.get((kind, role, where), ()))
        added = sum(place.count for place in places) - gone
        if added > 0:
            # The line is worth showing where the function holds a single place.
            rises.append(Rise(kind, role, places[0].where if len(places) == 1 else where, added))
    return tuple(sorted(rises, key=lambda rise: (-rise.added, rise.where)))


def allow(added: Mapping[str, int | None], rises: Sequence[Rise], allowances: Sequence[Allowance]) -> Rises:
    """What of the rises in total no allowance covers.

    An allowance covers no more than what rose at the places that it names, and no more than it says. What a
    kind's total rose beyond that is left, so a rise that no place was recorded for is never covered."""
    left = {kind: count for kind, count in added.items() if count}
    open_rises = {rise: rise.added for rise in rises}
    accepted, unused = [], []
    for allowance in allowances:
        room = allowance.most
        for rise, count in open_rises.items():
            if allowance.covers(rise):
                taken = min(room, count)
                room -= taken
                open_rises[rise] -= taken
        used = allowance.most - room
        name = f"{allowance.kind}: {allowance.role} {allowance.place} +{allowance.most}"
        if used:
            left[allowance.kind] = left.get(allowance.kind, 0) - used
            accepted.append(f"{name}, {used} used ({allowance.reason})")
        else:
            unused.append(f"allowed and not needed: {name}")
    return Rises({kind: n for kind, n in left.items() if n > 0}, tuple(accepted), tuple(unused))
