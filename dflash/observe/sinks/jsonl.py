"""metrics.jsonl in the run's folder: always written, one JSON object a line."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any, ClassVar, TextIO

from dflash.observe.sinks.base import Row, Sink

FILE_NAME = "metrics.jsonl"


class JsonlSink(Sink):
    """Appends rows to `metrics.jsonl`.

    Each batch of rows is written and flushed to the operating system at once, so a killed process loses nothing that was
    written; `fsync` runs at most once every `fsync_s` and at the end, so a machine that loses power loses at most that much.
    A line cut short by a full disk is ended first when writing goes on, so every other line stays readable.
    """

    name: ClassVar[str] = "jsonl"

    def __init__(self, run_dir: Path, fsync_s: float = 60.0) -> None:
        self.path = run_dir / FILE_NAME
        self._fsync_s = fsync_s
        self._synced_s = time.monotonic()
        self._file: TextIO | None = None

    def open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        cut_short = self.path.exists() and not _ends_with_newline(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        if cut_short:
            self._file.write("\n")

    def write(self, rows: list[Row]) -> None:
        assert self._file is not None
        self._file.write("".join(to_line(row) for row in rows))
        self._file.flush()
        if time.monotonic() - self._synced_s >= self._fsync_s:
            os.fsync(self._file.fileno())
            self._synced_s = time.monotonic()

    def close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


def to_line(row: Row) -> str:
    """A row as one line of strict JSON. JSON lacks NaN and infinities: they become the strings `NaN`, `Infinity`, `-Infinity`."""
    head = {"kind": row.kind, "elapsed_s": round(row.elapsed_s, 6), "step": row.step}
    try:
        text = json.dumps({**head, "values": row.values}, allow_nan=False)
    except ValueError:
        text = json.dumps({**head, "values": _strict(row.values)}, allow_nan=False)
    return text + "\n"


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _strict(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(part) for part in value]
    return value


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
