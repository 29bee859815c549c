"""What `bench.peers.shapes` measured, a line of JSON for each shape, and the table made from them.

A line is written when its shape is done, so a run that ends early keeps what it has, and the next one goes on
with what is missing."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from bench.peers.speed import Shape
from steptime.errors import UserError

SCHEMA = "dflash-peers-shapes/2"


@dataclass(frozen=True)
class Ratio:
    """A peer's time over ours, with the bounds of its two-sided 90% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Row:
    """One trainer at one shape.

    Attributes:
        seconds: of each step in a pair; ours are those of the pairs with every peer.
        ratio: None for ours.
        syncs: host syncs of a step.
    """

    trainer: str
    seconds: list[float]
    ratio: Ratio | None
    peak_bytes: int
    operations: int
    syncs: float


@dataclass(frozen=True)
class State:
    """The machine while a shape was measured.

    Attributes:
        load: the load average of the last minute, when it began.
        others: share of the cores that other programs used meanwhile, None where it cannot be told.
        stolen: share of the cores that the hypervisor gave to others, None where it does not say.
        mhz: clock of the processor at the end, None where it is not known.
    """

    load: float | None
    others: float | None
    stolen: float | None
    mhz: float | None


@dataclass(frozen=True)
class Origin:
    """Where a line comes from: another origin is measured anew.

    Attributes:
        machine: its key, as of the folders under `baselines/`.
    """

    machine: str
    versions: str
    threads: int


@dataclass(frozen=True)
class Line:
    """One shape, all trainers, ours last.

    Attributes:
        commit: the first ten digits, with a `+` where something was not committed.
        date: UTC, ISO 8601.
        pairs: with each peer.
    """

    shape: Shape
    origin: Origin
    commit: str
    date: str
    pairs: int
    state: State
    rows: tuple[Row, ...]

    def row(self, trainer: str) -> Row:
        """The row of a trainer. KeyError where it has none."""
        found = [row for row in self.rows if row.trainer == trainer]
        if not found:
            raise KeyError(trainer)
        return found[0]


def add_line(path: Path, line: Line) -> None:
    """Append a line and push it to the disk.

    Raises:
        UserError: the file cannot be written.
    """
    text = json.dumps({"schema": SCHEMA, **asdict(line)}) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if path.exists() else "wb") as file:
            file.seek(0, os.SEEK_END)
            file.truncate(_whole_bytes(path))
            file.seek(0, os.SEEK_END)
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"{path}: cannot write: {error.strerror}") from None


def _whole_bytes(path: Path) -> int:
    """Up to the last end of a line: a run that was killed may have left half of one behind it."""
    return path.read_bytes().rfind(b"\n") + 1


def read_lines(path: Path) -> list[Line]:
    """All whole lines in the order written; empty where there is no file.

    Raises:
        UserError: it cannot be read, or a whole line is no line of this program.
    """
    if not path.exists():
        return []
    try:
        parts = path.read_bytes()[: _whole_bytes(path)].decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read: {error}") from None
    return [_parsed(text, f"{path}:{number}") for number, text in enumerate(parts, 1)]


def _parsed(text: str, where: str) -> Line:
    try:
        tree: dict[str, Any] = json.loads(text)
        if tree["schema"] != SCHEMA:
            raise UserError(f"{where}: schema {tree['schema']!r}, this program reads {SCHEMA!r}")
        return Line(
            Shape(**tree["shape"]),
            Origin(**tree["origin"]),
            tree["commit"],
            tree["date"],
            int(tree["pairs"]),
            State(**tree["state"]),
            tuple(_row(row) for row in tree["rows"]),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{where}: no line of bench.peers.shapes: {error!r}") from None


def _row(tree: dict[str, Any]) -> Row:
    ratio = Ratio(**tree["ratio"]) if tree["ratio"] else None
    return Row(**{**tree, "ratio": ratio})


def known(lines: Sequence[Line], shape: Shape, origin: Origin, pairs: int) -> Line | None:
    """The last line of that shape and origin with at least so many pairs; None: it is to be measured."""
    for line in reversed(lines):
        if line.shape == shape and line.origin == origin and line.pairs >= pairs:
            return line
    return None


def latest(lines: Sequence[Line]) -> list[Line]:
    """Of each shape and origin the last line, by precision, vocabulary, context and anchors."""
    last = {(line.shape, line.origin): line for line in lines}.values()

    def size(line: Line) -> tuple[bool, int, int, int]:
        shape = line.shape
        return shape.dtype != "fp32", shape.vocab, shape.context, shape.anchors

    return sorted(last, key=size)


def table(lines: Sequence[Line]) -> str:
    """One line for each shape; figures of all trainers are in the order of the heading."""
    body = []
    for line in lines:
        peers = [row for row in line.rows if row.ratio is not None]
        every = [line.row("ours"), *peers]
        shape = line.shape
        body.append(
            (
                shape.dtype,
                f"{shape.context:,}",
                shape.anchors,
                f"{shape.vocab:,}",
                f"{np.median(every[0].seconds):.2f} s",
                *(str(row.ratio) for row in peers),
                " / ".join(f"{row.peak_bytes / 2**20:,.0f}" for row in every),
                " / ".join(str(row.operations) for row in every),
                " / ".join(f"{row.syncs:g}" for row in every),
                "?" if line.state.others is None else f"{line.state.others:.0%}",
            )
        )
    names = [row.trainer for row in lines[0].rows if row.ratio is not None] if lines else []
    headers = (
        "precision",
        "context",
        "anchors",
        "V",
        "our step",
        *(f"{name} / ours (90%)" for name in names),
        f"peak MiB: {' / '.join(['ours', *names])}",
        "operations",
        "host syncs",
        "others",
    )
    return tabulate(body, headers=headers, tablefmt="github", disable_numparse=True)


def caption(lines: Sequence[Line]) -> str:
    """When, where, by which code and which versions, in two lines or three."""
    if not lines:
        return "nothing measured yet"
    dates = sorted({line.date[:10] for line in lines})
    commits = list(dict.fromkeys(line.commit for line in lines))
    pairs = sorted({line.pairs for line in lines})
    threads = sorted({line.origin.threads for line in lines})
    loads = [line.state.load for line in lines if line.state.load is not None]
    load = f"load {min(loads):.1f} to {max(loads):.1f}" if loads else "load unknown"
    return "\n".join(
        (
            f"{_range(dates)}, commit {', '.join(commits)}, {', '.join(_once(lines, 'versions'))}",
            f"{', '.join(_once(lines, 'machine'))}, threads: {_range(threads)}, pairs with each peer: "
            f"{_range(pairs)}, {load}",
        )
    )


def _once(lines: Sequence[Line], name: str) -> list[str]:
    return list(dict.fromkeys(str(getattr(line.origin, name)) for line in lines))


def _range(values: Sequence[Any]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"
