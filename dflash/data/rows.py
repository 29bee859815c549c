"""Rows of data files, one after the other, from any place on: a file is never held as a whole (a JSON array
is)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptime.errors import UserError

if TYPE_CHECKING:
    import pyarrow
    from pyarrow.parquet import ParquetFile

SUFFIXES = (".jsonl", ".json", ".parquet")
BATCH_ROWS = 256
"""Rows of a Parquet file that are decoded at a time."""
PIECE_BYTES = 4 << 20
PIECE_ROWS = 2048
PIECES_OF_A_GROUP = 32
"""A row group can only be read from its beginning, so it is not cut finer: with 32 pieces, what is decoded in
vain stays small beside the tokenising."""
_BUFFER = 1 << 20


def data_files(path: Path) -> list[Path]:
    """The file itself, or the data files of a folder in order of their names.

    Raises:
        UserError: nothing there.
    """
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        if not files:
            raise UserError(f"{path}: no {', '.join(SUFFIXES)} file in this folder")
        return files
    if not path.is_file():
        raise UserError(
            f"{path}: no such file; data.path takes a JSONL or Parquet file, a folder of them, or 'stdlib'"
        )
    return [path]


@dataclass(frozen=True, slots=True)
class RawRow:
    """A line of a file.

    Attributes:
        line: from 1 (item of a JSON array, row of a Parquet file).
        value: what it holds, or None when it is broken.
        reason: why it is broken.
        bytes: its share of the file, for progress.
    """

    line: int
    value: Any
    reason: str = ""
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a file that stand together: what one process reads.

    Attributes:
        line: of its first row, from 1.
        bytes: its share of the file.
        start, stop: of a JSONL, the bytes; of a row group, the rows within it; a JSON array is one piece.
        group: row group of a Parquet file; -1 for the others.
    """

    path: Path
    line: int
    bytes: int
    start: int
    stop: int
    group: int = -1


def read_rows(path: Path) -> Iterator[RawRow]:
    """The rows of a JSONL, JSON-array or Parquet file. Broken lines come with their reason.

    Raises:
        UserError: a file that cannot be read at all; of a damaged Parquet file, its row group.
    """
    for piece in pieces_of(path, whole=True):
        yield from read_piece(piece)


def pieces_of(path: Path, whole: bool = False) -> list[Piece]:
    """A file cut into pieces of some megabytes that can be read on their own. Depends only on the file.

    Args:
        whole: no cuts within a JSONL or a row group.

    Raises:
        UserError: a file that cannot be read at all.
    """
    try:
        size = path.stat().st_size
        if path.suffix == ".parquet":
            return _parquet_pieces(path, size, whole)
        if whole or _is_array(path):
            return [Piece(path, 1, size, 0, size)]
        return _jsonl_pieces(path, size)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_piece(piece: Piece) -> Iterator[RawRow]:
    """Its rows, as `read_rows`."""
    path = piece.path
    if piece.group >= 0:
        yield from _parquet_rows(piece)
        return
    try:
        with path.open("rb") as file:
            if not piece.start and _is_array(path):
                yield from _array_rows(path, file.read())
                return
            file.seek(piece.start)
            line, left = piece.line, piece.stop - piece.start
            while left > 0 and (raw := file.readline()):
                if not raw.isspace():
                    yield _json_row(line, raw)
                line, left = line + 1, left - len(raw)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


# -- JSON ----------------------------------------------------------------------------------------------------


def _is_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _jsonl_pieces(path: Path, size: int) -> list[Piece]:
    """Cut behind the first line feed after every so many bytes."""
    pieces, line, start = [], 1, 0
    with path.open("rb") as file:
        while start < size:
            at, lines = start, 0
            while at < size and at - start < PIECE_BYTES and (block := file.read(_BUFFER)):
                lines += block.count(b"\n")
                at += len(block)
            if at < size and block and not block.endswith(b"\n"):
                at += len(file.readline())
                lines += 1
            pieces.append(Piece(path, line, at - start, start, at))
            line, start = line + lines, at
            if not block:  # it has become shorter meanwhile
                break
    return pieces


def _json_row(line: int, raw: bytes) -> RawRow:
    try:
        return RawRow(line, json.loads(raw), bytes=len(raw))
    except UnicodeDecodeError as error:
        return RawRow(line, None, f"not valid UTF-8 (byte {error.start + 1})", len(raw))
    except (ValueError, RecursionError) as error:
        return RawRow(line, None, f"not valid JSON: {_json_fault(error)}", len(raw))


def _json_fault(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.lower()} at column {error.colno}"
    return str(error)


def _array_rows(path: Path, raw: bytes) -> Iterator[RawRow]:
    try:
        rows = json.loads(raw)
    except (ValueError, RecursionError) as error:
        fault = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(f"{path}: not valid JSON: {fault}") from None
    share = len(raw) // max(len(rows), 1)
    for item, value in enumerate(rows, 1):
        yield RawRow(item, value, bytes=share)


# -- Parquet -------------------------------------------------------------------------------------------------


def _open_parquet(path: Path) -> ParquetFile:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        # Without pre_buffer a row group is read page by page, and not as a whole.
        return ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False, page_checksum_verification=True)
    except (ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise UserError(f"{path}: not a readable Parquet file: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _parquet_pieces(path: Path, size: int, whole: bool) -> list[Piece]:
    with _open_parquet(path) as file:
        counts = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    pieces, line, rows = [], 1, max(sum(counts), 1)
    for group, count in enumerate(counts):
        step = count if whole else max(PIECE_ROWS, -(-count // PIECES_OF_A_GROUP))
        for start in range(0, count, max(step, 1)):
            stop = min(start + step, count)
            pieces.append(Piece(path, line + start, size * (stop - start) // rows, start, stop, group))
        line += count
    return pieces


def _parquet_rows(piece: Piece) -> Iterator[RawRow]:
    from pyarrow import ArrowException

    rows = piece.stop - piece.start
    share, left, line = piece.bytes // max(rows, 1), rows, piece.line
    try:
        with _open_parquet(piece.path) as file:
            skip, read = piece.start, 0
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[piece.group]):
                first = min(skip, len(batch))
                skip -= first
                part = batch.slice(first, left)
                read += len(part)
                for value, reason in _values(part):
                    yield RawRow(line, value, reason, share)
                    line += 1
                left = rows - read
                if not left:
                    return
            raise OSError(f"{rows - left} rows are there of {rows}")
    except (ArrowException, OSError) as error:
        raise UserError(
            f"{piece.path}: row group {piece.group} (rows {piece.line} to {piece.line + rows - 1}) cannot be "
            f"read: {_first_line(error)}"
        ) from None


def _values(batch: pyarrow.RecordBatch) -> Iterator[tuple[Any, str]]:
    """Each row's value, or None and why it has none."""
    try:
        yield from ((value, "") for value in batch.to_pylist())
    except (UnicodeDecodeError, ValueError, OverflowError):  # one by one the others still come
        for place in range(len(batch)):
            try:
                yield batch.slice(place, 1).to_pylist()[0], ""
            except UnicodeDecodeError as error:
                yield None, f"not valid UTF-8 (byte {error.start + 1})"
            except (ValueError, OverflowError) as error:
                yield None, f"cannot be decoded: {_first_line(error)}"
