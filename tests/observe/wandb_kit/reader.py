"""Reads `.wandb` files: LevelDB's log format around records of `wandb.proto`.

The file is cut into blocks of 32 KiB. The first begins with a header of 7 bytes (`:W&B`, a magic number, a
version). A record is one or several chunks: crc32 of type and data (4 bytes; IEEE's and not masked, unlike
LevelDB's), length (2), type (1: full, 2: first, 3: middle, 4: last), data. A chunk never crosses a block;
fewer than 7 bytes left in a block are zeros."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

BLOCK = 32 * 1024
HEADER = 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class OfflineRun:
    """What a `.wandb` file holds: rows of history in order with W&B's own steps, `define_metric`
    calls, summary, config."""

    history: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, str] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    stats: int = 0
    run_id: str = ""
    steps: list[int] = field(default_factory=list)


def records(data: bytes) -> Iterator[bytes]:
    """The records of a file; a last one that was cut short is left out."""
    if data[:4] != b":W&B":
        raise ValueError("not a .wandb file")
    at, parts = HEADER, b""
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        checksum, length, kind = struct.unpack_from("<IHB", data, at)
        chunk = data[at + HEADER : at + HEADER + length]
        if kind == 0 or len(chunk) < length:
            return
        if zlib.crc32(bytes([kind]) + chunk) != checksum:
            raise ValueError(f"checksum of the chunk at byte {at} is wrong")
        parts += chunk
        if kind in (FULL, LAST):
            yield parts
            parts = b""
        at += HEADER + length


def read_run(folder: Path) -> OfflineRun:
    """The one run under a folder that W&B wrote to."""
    (path,) = folder.glob("wandb/*run-*/run-*.wandb")
    return read_file(path)


def read_file(path: Path) -> OfflineRun:
    """One `.wandb` file."""
    run = OfflineRun()
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        match record.WhichOneof("record_type"):
            case "history":
                run.history.append(_items(record.history.item))
                run.steps.append(record.history.step.num)
            case "run":
                run.run_id = record.run.run_id
            case "metric":
                run.metrics[record.metric.glob_name or record.metric.name] = record.metric.step_metric
            case "summary":
                run.summary |= _items(record.summary.update)
            case "config":
                run.config |= _items(record.config.update)
            case "stats":
                run.stats += 1
    return run


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
