"""What `dflash prepare` does to files: any rows with a question and an answer -> a chat JSONL, and a look at
a data set."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash.data.messages import check_text
from dflash.data.progress import Progress
from dflash.data.rows import RawRow, data_files, read_rows
from dflash.data.template import BadSample
from steptime.errors import UserError, nearest
from steptime.files import atomic_text


@dataclass(frozen=True)
class Fields:
    """Which fields of a row hold which part.

    Attributes:
        user: one or more; their texts are joined with an empty line, empty ones left out.
        assistant: the answer.
        system: optional.
    """

    user: tuple[str, ...]
    assistant: str
    system: str | None = None


@dataclass
class Converted:
    """What came of a conversion."""

    out: Path
    written: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)


def convert(
    source: Path, fields: Fields, out: Path, skip_bad: bool = False, cache: str | Path = "cache"
) -> Converted:
    """Write `{"conversations": [...]}` for every row of a JSONL, JSON array or Parquet file. Whole or not at
    all.

    Raises:
        UserError: a missing field, an empty answer, a broken line (with `skip_bad` only counted), no row at
            all, `out` that is the source itself or cannot be written.
    """
    files = data_files(source)
    if any(out.resolve() == file.resolve() for file in files):
        raise UserError(f"--out {out}: is the file to convert; give another one")
    result = Converted(out)
    with atomic_text(out) as sink:
        for file in files:
            with Progress(f"Converting {file.name}", file.stat().st_size, "bytes") as progress:
                for row in read_rows(file):
                    progress.advance(row.bytes)
                    try:
                        turns = conversation_from(row, fields)
                    except BadSample as error:
                        if not skip_bad:
                            raise UserError(f"{file}:{row.line}: {error}") from None
                        result.skipped.append((f"{file}:{row.line}", str(error)))
                        continue
                    sink.write(json.dumps({"conversations": turns}, ensure_ascii=False) + "\n")
                    result.written += 1
        if not result.written:
            raise UserError(
                f"{source}: no usable row{f', the first: {result.skipped[0][1]}' if result.skipped else ''}"
            )
    return result


def conversation_from(row: RawRow, fields: Fields) -> list[dict[str, str]]:
    """The turns of one row.

    Raises:
        BadSample: a broken line, a missing field (the nearest one is named), a value that is no text, an
            empty part.
    """
    if row.value is None:
        raise BadSample(row.reason or "empty line")
    if not isinstance(row.value, Mapping):
        raise BadSample(f"a {type(row.value).__name__} where an object is expected")
    question = "\n\n".join(filter(None, (_text(row.value, name) for name in fields.user)))
    answer = _text(row.value, fields.assistant)
    if not question.strip():
        raise BadSample(f"no question: {' and '.join(map(repr, fields.user))} empty")
    if not answer.strip():
        raise BadSample(f"no assistant text: {fields.assistant!r} is empty")
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    system = _text(row.value, fields.system) if fields.system else ""
    return [{"role": "system", "content": system}, *turns] if system.strip() else turns


def _text(row: Mapping[str, Any], name: str) -> str:
    if name not in row:
        raise BadSample(
            f"no field {name!r} (found: "
            f"{', '.join(map(str, row)) or 'nothing'}){nearest(name, map(str, row))}"
        )
    value = row[name]
    if value is None:
        return ""
    if isinstance(value, str):
        check_text(value, f"field {name!r}")
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise BadSample(f"field {name!r} holds a {type(value).__name__}, not text")


def list_skipped(skipped: Sequence[tuple[str, str]], most: int = 10) -> list[str]:
    """Lines for people: the first `most` and how many more there are."""
    lines = [f"  {origin}: {reason}" for origin, reason in skipped[:most]]
    if len(skipped) > most:
        lines.append(f"  ... and {len(skipped) - most:,} more")
    return lines
