"""What the text of a pull request lets through on purpose: pure.

    Bench-Accept: syncs: drafter/0 drafter_worker.py _micro_step +1 -- the norm is read for the log
    Bench-Accept: numerics changed -- another order of summation

Each such line is one allowance of `gate`, with its own reason. What it allows is measured, told first in
every report, and held back until a reviewer approves (docs/ci.md)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from steptime.errors import UserError, nearest
from steptime.statistics.intended import Allowance, Numerics, parse_allowance

WORD = "Bench-Accept:"
FORM = f"'{WORD} KIND: ROLE PLACE +N -- reason' or '{WORD} numerics close|changed -- reason'"


@dataclass(frozen=True, slots=True)
class Accepted:
    """Attributes: `numerics` and its reason, `allowances` each with one; `lines` as they were written."""

    numerics: Numerics = Numerics.SAME
    reason: str = ""
    allowances: tuple[Allowance, ...] = ()
    lines: tuple[str, ...] = ()


def parse_text(text: str) -> Accepted:
    """The lines of a pull request's text that begin with `Bench-Accept:`; others are prose.

    Raises:
        UserError: such a line has another form, or no reason; with the line.
    """
    numerics, reason = Numerics.SAME, ""
    allowances: list[Allowance] = []
    lines: list[str] = []
    for line in text.splitlines():
        if not line.strip().lower().startswith(WORD.lower()):
            continue
        lines.append(line.strip())
        what, _, why = line.strip()[len(WORD) :].partition(" -- ")
        if not why.strip():
            raise UserError(f"{line.strip()!r}: no reason; the form is {FORM}")
        found = re.fullmatch(r"\s*numerics\s+(\S+)\s*", what)
        if found is None:
            allowances.append(parse_allowance(what, why.strip()))
            continue
        modes = [mode.value for mode in Numerics if mode is not Numerics.SAME]
        if found[1] not in modes:
            raise UserError(f"{line.strip()!r}: no such mode{nearest(found[1], modes)}; {' or '.join(modes)}")
        if numerics is not Numerics.SAME:
            raise UserError(f"{line.strip()!r}: numerics are accepted twice")
        numerics, reason = Numerics(found[1]), why.strip()
    return Accepted(numerics, reason, tuple(allowances), tuple(lines))
