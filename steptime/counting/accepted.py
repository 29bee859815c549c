"""Places that a project has accepted: a comment on the line, or a reviewed file.

    loss.item()  # sync-ok: the learning rate needs it

    [[accepted]]                       # syncs.toml
    file = "train.py"
    function = "main"
    kind = "item()"
    reason = "the learning rate needs it"

A line number is not part of an entry: it would name another line after the next edit."""

from __future__ import annotations

import json
import linecache
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from steptime.errors import UserError
from steptime.syncs.scopes import Place

_COMMENT = re.compile(r"#\s*sync-ok:\s*(\S.*)")


@dataclass(frozen=True)
class Accepted:
    """One entry of the file."""

    file: str
    function: str
    kind: str
    reason: str

    def covers(self, kind: str, place: Place) -> bool:
        """Whether it is this kind in this function of this file."""
        same = place.where.rpartition(":")[0] == self.file or place.file.endswith("/" + self.file)
        return same and (self.function, self.kind) == (place.function, kind)


def read(path: Path) -> tuple[Accepted, ...]:
    """Raises UserError: the file is missing or says something else."""
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8")).get("accepted", [])
        return tuple(Accepted(**entry) for entry in entries)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); --write makes it") from None
    except (tomllib.TOMLDecodeError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: [[accepted]] wants file, function, kind and reason: {error}") from None


def write(path: Path, found: Iterable[tuple[str, Place]], before: Iterable[Accepted] = ()) -> None:
    """Write entries for all places, those that were accepted before with their reasons."""
    entries = {(one.file, one.function, one.kind): one.reason for one in before}
    for kind, place in found:
        entries.setdefault((place.where.rpartition(":")[0], place.function, kind), "not reviewed yet")
    lines = ["# Host syncs that are accepted. Give each a reason."]
    for (file, function, kind), reason in sorted(entries.items()):
        lines.append("\n[[accepted]]")
        pairs = {"file": file, "function": function, "kind": kind, "reason": reason}
        lines += [f"{name} = {json.dumps(value)}" for name, value in pairs.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def reason_for(kind: str, places: Iterable[Place], entries: Iterable[Accepted]) -> str | None:
    """Why a wait is accepted, by the comment on one of its lines or by an entry; None: it is new."""
    known = tuple(entries)
    for place in places:
        said = _COMMENT.search(linecache.getline(place.file, place.line))
        if said:
            return said.group(1).strip()
        for entry in known:
            if entry.covers(kind, place):
                return entry.reason
    return None
