"""What travels to the sinks, and what a sink is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

RowKind = Literal["run", "metrics", "live", "train", "event", "summary"]


@dataclass(frozen=True, slots=True)
class Row:
    """One thing to write.

    Attributes:
        kind: `run` (first row: the layout), `metrics` (one flush window), `live` (one tick), `train` (scalars of one
            step), `event` (a line of text: a collector went away), `summary` (last row).
        elapsed_s: time since the observer started.
        step: optimizer step; for `train` the step the scalars belong to, else drafter 0's at the sample.
        values: numbers by key; for `run`, `event` and `summary` anything JSON can hold.
        seconds: length of the window that `values` cover (`metrics` and `live`).
    """

    kind: RowKind
    elapsed_s: float
    step: int
    values: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class Sink:
    """Where rows go. Opened, written and closed by one thread of its own; may take its time, may raise.

    Attributes:
        kinds: which rows it wants.
        close_timeout_s: how long the end of a run waits for it.
        retries: a failed write loses its rows and the next is tried; else the first failure is the last.
    """

    name: ClassVar[str]
    kinds: frozenset[RowKind] = frozenset({"run", "metrics", "train", "event", "summary"})
    close_timeout_s: float = 10.0
    retries: ClassVar[bool] = False

    def open(self) -> None:
        """Connect; rows collect in the outbox meanwhile."""

    def write(self, rows: list[Row]) -> None:
        """Write rows, oldest first."""
        raise NotImplementedError

    def close(self) -> None:
        """Write what is left and disconnect."""
