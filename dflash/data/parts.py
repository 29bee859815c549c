"""Tokenised pieces of a large data set on disk: each appears whole or not at all, and all of them together
become the arrays of a cache."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np

from dflash.data.dataset import Tally
from dflash.data.rows import Piece

COLUMNS = {"input_ids": np.dtype(np.int32), "loss_mask": np.dtype(bool)}
"""One entry a token; `lengths` and `lines` have one a sample."""
PER_SAMPLE = {"lengths": np.dtype(np.int64), "lines": np.dtype(np.int64)}
META = "meta.json"
_BLOCK = 1 << 20


class PartWriter:
    """A sink that keeps nothing: samples go to files of raw numbers in `folder`."""

    def __init__(self, folder: Path, files: ExitStack) -> None:
        self._folder = folder
        self._files: dict[str, IO[bytes]] = {
            name: files.enter_context((folder / name).open("wb")) for name in (*COLUMNS, *PER_SAMPLE)
        }
        self._crc32 = dict.fromkeys(self._files, 0)
        self._samples = self._tokens = 0

    def __len__(self) -> int:
        return self._samples

    def add(self, ids: np.ndarray, mask: np.ndarray, file: str, line: int) -> None:
        self._put("input_ids", ids.astype(np.int32, copy=False))
        self._put("loss_mask", mask.astype(bool, copy=False))
        self._put("lengths", np.array([len(ids)], np.int64))
        self._put("lines", np.array([line], np.int64))
        self._samples += 1
        self._tokens += len(ids)

    def _put(self, name: str, values: np.ndarray) -> None:
        raw = values.tobytes()
        self._files[name].write(raw)
        self._crc32[name] = zlib.crc32(raw, self._crc32[name])

    def close(self, piece: Piece, tally: Tally) -> None:
        """Write what the part is of and what it holds."""
        record = {
            "piece": described(piece),
            "samples": self._samples,
            "tokens": self._tokens,
            "crc32": self._crc32,
            "tally": asdict(tally),
        }
        (self._folder / META).write_text(json.dumps(record) + "\n", encoding="utf-8")


def described(piece: Piece) -> dict[str, Any]:
    """A piece as JSON has it."""
    return asdict(piece) | {"path": str(piece.path)}


def read_part(folder: Path, piece: Piece) -> dict[str, Any] | None:
    """What the part of this piece says of itself; None when it is not there, is another piece's, or its
    checksums do not hold."""
    try:
        record = json.loads((folder / META).read_text(encoding="utf-8"))
        if record["piece"] != described(piece):
            return None
        sizes = {name: record["tokens"] * dtype.itemsize for name, dtype in COLUMNS.items()}
        sizes |= {name: record["samples"] * dtype.itemsize for name, dtype in PER_SAMPLE.items()}
        for name, size in sizes.items():
            crc32 = length = 0
            for block in blocks_of(folder / name):
                crc32, length = zlib.crc32(block, crc32), length + len(block)
            if (length, crc32) != (size, record["crc32"][name]):
                return None
        Tally(**record["tally"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record


def blocks_of(path: Path, start: int = 0) -> Iterator[bytes]:
    """A file's bytes, a megabyte at a time."""
    with path.open("rb") as file:
        file.seek(start)
        while block := file.read(_BLOCK):
            yield block


def join(folder: Path, parts: Sequence[tuple[Path, dict[str, Any]]]) -> dict[str, Any]:
    """Make the arrays of a cache under `folder` from whole parts, in their order.

    Returns:
        The cache's record: files, tally, checksums.
    """
    samples = sum(record["samples"] for _, record in parts)
    tokens = sum(record["tokens"] for _, record in parts)
    crc32 = {}
    for name, dtype in COLUMNS.items():
        columns = (block for part, _ in parts for block in blocks_of(part / name))
        crc32[name] = write_array(folder / f"{name}.npy", dtype, (tokens,), columns)
    files = list(dict.fromkeys(record["piece"]["path"] for _, record in parts if record["samples"]))
    index = {path: number for number, path in enumerate(files)}
    int64 = np.dtype(np.int64)
    crc32["offsets"] = write_array(folder / "offsets.npy", int64, (samples + 1,), _offsets(parts))
    crc32["places"] = write_array(folder / "places.npy", int64, (samples, 2), _places(parts, index))
    tally = Tally()
    for _, record in parts:
        found = Tally(**record["tally"])
        found.skipped = [(origin, reason) for origin, reason in found.skipped]
        tally.add(found)
    return {"files": files, "tally": asdict(tally), "crc32": crc32}


def write_array(path: Path, dtype: np.dtype, shape: tuple[int, ...], blocks: Iterator[bytes]) -> int:
    """A `.npy` file from its bytes; gives their CRC-32."""
    crc32 = 0
    with path.open("wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            file.write(block)
            crc32 = zlib.crc32(block, crc32)
    return crc32


def _offsets(parts: Sequence[tuple[Path, dict[str, Any]]]) -> Iterator[bytes]:
    end = 0
    yield np.zeros(1, np.int64).tobytes()
    for part, record in parts:
        ends = end + np.cumsum(np.fromfile(part / "lengths", np.int64))
        yield ends.tobytes()
        end += record["tokens"]


def _places(parts: Sequence[tuple[Path, dict[str, Any]]], index: dict[str, int]) -> Iterator[bytes]:
    for part, record in parts:
        lines = np.fromfile(part / "lines", np.int64)
        number = index.get(record["piece"]["path"], 0)
        yield np.stack([np.full_like(lines, number), lines], axis=1).tobytes()
