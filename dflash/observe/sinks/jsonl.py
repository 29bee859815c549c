"""metrics.jsonl in the run's folder: always written, one JSON object a line."""

from __future__ import annotations

import json
import math
import os
import time
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar

from dflash.config import ObserveConfig
from dflash.observe.sinks.base import Row, Sink, Surroundings

FILE_NAME = "metrics.jsonl"
_ENCODER = json.JSONEncoder(allow_nan=False)


class JsonlSink(Sink):
    """Appends rows to `metrics.jsonl`.

    A row is with the operating system when `write` returns, so a killed process loses none that was written.
    `fsync` runs at most once every `fsync_s` and at the end: a machine that loses power loses at most the
    rows since. On a full disk rows are lost until there is room; a line that was cut short is ended first, so
    every other line stays readable. Rows that failed together count as lost together, though some may have
    been written."""

    name: ClassVar[str] = "jsonl"
    retries: ClassVar[bool] = True
    settles: ClassVar[bool] = True

    def __init__(self, run: Surroundings, fsync_s: float = 60.0) -> None:
        self.path = run.run_dir / FILE_NAME
        self._fsync_s = fsync_s
        self._synced_s = time.monotonic()
        self._file: FileIO | None = None
        self._cut = False

    @classmethod
    def wanted(cls, config: ObserveConfig) -> bool:
        return True

    def open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._cut = self.path.is_file() and not _ends_with_newline(self.path)
        self._file = FileIO(self.path, "a")

    def write(self, rows: list[Row]) -> None:
        if self._file is None:
            self.open()
        self._append("".join(map(to_line, rows)).encode())
        if time.monotonic() - self._synced_s >= self._fsync_s:
            self._sync()

    def close(self) -> None:
        if self._file is not None:
            self._sync()
            self._file.close()

    def _append(self, lines: bytes) -> None:
        assert self._file is not None
        data = b"\n" + lines if self._cut else lines
        while data:
            # A disk that fills up takes the part that fits, and raises at the next call.
            written = self._file.write(data) or 0
            self._cut = data[written - 1 : written] != b"\n" if written else self._cut
            data = data[written:]

    def _sync(self) -> None:
        assert self._file is not None
        self._synced_s = time.monotonic()
        os.fsync(self._file.fileno())


def to_line(row: Row) -> str:
    """A row as one line of strict JSON. JSON lacks NaN and infinities: they become the strings `NaN`,
    `Infinity`, `-Infinity`."""
    head = {"kind": row.kind, "elapsed_s": round(row.elapsed_s, 6), "step": row.step}
    try:
        text = _ENCODER.encode({**head, "values": row.values})
    except ValueError:
        text = _ENCODER.encode({**head, "values": _strict(row.values)})
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
