"""What a stage of the check is, what it finds, and when that is red."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import TypeAdapter, ValidationError

from steptime.child_process import Ended


@dataclass(frozen=True, slots=True)
class Table:
    """Rows for the page."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Found:
    """What a stage found.

    Attributes:
        looked_at: how many things it looked at, in `unit`; a stage that looked at nothing has shown nothing.
        problems: what is not as claimed, one line each.
        notes: what a reader must know, e.g. what was not asked for.
    """

    looked_at: int
    unit: str
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()


class Stage(Protocol):
    """One thing that is asked of a GPU.

    Attributes:
        asks: one sentence.
        seconds: its share of the time; past it the stage is killed.
    """

    name: str
    asks: str
    seconds: int

    def look(self) -> Found:
        """Inside a process of its own, in the repository's folder, with a CUDA GPU."""


State = Literal["as claimed", "not as claimed", "crashed", "not finished", "not run"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a stage.

    Attributes:
        problems: why it is red; empty only where all is as claimed.
    """

    stage: str
    asks: str
    state: State
    seconds: float
    problems: tuple[str, ...] = ()
    found: Found | None = None

    @property
    def red(self) -> bool:
        return self.state != "as claimed"


FOUND = TypeAdapter(Found)
OUTCOME = TypeAdapter(Outcome)


def judge(stage: Stage, ended: Ended, answer: bytes | None) -> Outcome:
    """Pure: a stage is as claimed if it ended by itself, looked at something, and found no problem.

    Args:
        answer: the JSON of its `Found`; None: it left none.
    """

    def outcome(state: State, *problems: str, found: Found | None = None) -> Outcome:
        return Outcome(stage.name, stage.asks, state, round(ended.seconds, 1), problems, found)

    if ended.code is None:
        return outcome("not finished", f"killed after {stage.seconds} s")
    if ended.code != 0:
        return outcome("crashed", f"exit code {ended.code}: {ended.last_line}")
    if answer is None:
        return outcome("crashed", "it left no result")
    try:
        found = FOUND.validate_json(answer)
    except ValidationError as error:
        return outcome("crashed", f"its result cannot be read: {str(error).splitlines()[0]}")
    problems = list(found.problems)
    if found.looked_at <= 0:
        problems.append(f"it looked at nothing ({found.looked_at} {found.unit})")
    return outcome("not as claimed" if problems else "as claimed", *problems, found=found)


def not_run(stage: Stage) -> Outcome:
    """A stage that was not reached."""
    return Outcome(stage.name, stage.asks, "not run", 0.0, ("not run",))


def door_of(stage: Stage) -> str:
    """By what name another process finds the stage: `module:class`."""
    return f"{type(stage).__module__}:{type(stage).__qualname__}"


def rows_of(*rows: Sequence[Any]) -> tuple[tuple[str, ...], ...]:
    """Cells as text."""
    return tuple(tuple(str(cell) for cell in row) for row in rows)


def answer_path(folder: Path, stage: Stage) -> Path:
    """Where a stage leaves what it found, until the conductor has judged it."""
    return folder / f".{stage.name}.found.json"
