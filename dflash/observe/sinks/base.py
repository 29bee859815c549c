"""What travels to the sinks, and what a sink is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dflash.config import ObserveConfig
from dflash.observe.roles import RoleMap

if TYPE_CHECKING:
    from dflash.observe.state import State

RowKind = Literal["run", "metrics", "live", "rank", "train", "event", "summary"]


@dataclass(frozen=True, slots=True)
class Row:
    """One thing to write.

    Attributes:
        kind: `run` (first row: the layout), `metrics` (one flush window), `live` (one tick), `train` (scalars
            of one step), `rank` (a flush window of another rank, its keys begin with `rank1/`), `event` (a
            line of text: a collector went away), `summary` (last row).
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


@dataclass(frozen=True)
class Surroundings:
    """What a sink may know of its run.

    Attributes:
        run_dir: the run's folder.
        families: first parts of the keys that may come.
        sampled: those of the collectors that are on at the start.
    """

    config: ObserveConfig
    run_dir: Path
    roles: RoleMap
    families: Sequence[str] = ()
    sampled: Sequence[str] = ()


class Sink:
    """Where rows go. Opened, written and closed by one thread of its own; may take its time, may raise.

    `name` and `write` make a sink; it is on when `observe.sinks` names it.

    Attributes:
        switch: the key of `observe` that is its switch. Empty: `observe.sinks` names it.
        off: the value of that key for off.
        kinds: which rows it wants.
        close_timeout_s: how long the end of a run waits for it.
        settles: a checkpoint waits until it holds the rows of its steps; for files, never for servers.
        retries: a failed write loses its rows and the next is tried; else the first failure is the last.
    """

    name: ClassVar[str]
    kinds: frozenset[RowKind] = frozenset({"run", "metrics", "rank", "train", "event", "summary"})
    close_timeout_s: float = 10.0
    retries: ClassVar[bool] = False
    settles: ClassVar[bool] = False
    switch: ClassVar[str] = ""
    off: ClassVar[Any] = "off"

    def __init__(self, run: Surroundings) -> None:
        """What is slow to import is imported here, before the workers start."""

    @classmethod
    def wanted(cls, config: ObserveConfig) -> bool:
        """Whether the settings turn it on."""
        return getattr(config, cls.switch) != cls.off if cls.switch else cls.name in config.sinks

    @classmethod
    def examine(cls) -> tuple[State, str] | None:
        """The doctor's line about it on this machine; None: it works everywhere."""
        return None

    def open(self) -> None:
        """Connect; rows collect in the outbox meanwhile."""

    def write(self, rows: list[Row]) -> None:
        """Write rows, oldest first."""
        raise NotImplementedError

    def close(self) -> None:
        """Write what is left and disconnect."""
