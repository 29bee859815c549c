"""Tokenised data sets on disk, so that a file is tokenised once and not at every start."""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash.config import DataConfig
from dflash.data.dataset import Dataset, FlatSamples, Tally
from dflash.data.parts import blocks_of
from dflash.data.progress import Progress
from steptime.errors import UserError
from steptime.files import atomic_folder

FORMAT = 3
"""Raised when tokenising changes, so that an older cache is not taken for the new one."""

_BLOCK = 1 << 20
ARRAYS = ("input_ids", "loss_mask", "offsets", "places")


def cache_folder(config: DataConfig, files: Sequence[Path], tokenizer: Any, vocab_size: int | None) -> Path:
    """Where the tokens of these files lie, whether they do or not.

    The name is a digest of all that the tokens depend on: what stands in the files, their paths, the
    tokenizer and its template, and the settings."""
    import transformers

    stats = [(str(file.resolve()), file_digest(file)) for file in files]
    settings = [config.max_length, config.reasoning, config.turns, config.skip_bad, vocab_size]
    parts: list[Any] = [FORMAT, transformers.__version__, stats, settings]
    if tokenizer is not None:
        parts += [tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, tokenizer.special_tokens_map]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return Path(config.cache) / f"tokens-{digest}"


def file_digest(path: Path) -> str:
    """SHA-256 of what stands in a file, in hex: a file may change and keep its size and its time.

    Raises:
        UserError: it cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file, Progress(f"Reading {path.name}", path.stat().st_size, "bytes") as bar:
            while block := file.read(_BLOCK):
                digest.update(block)
                bar.advance(len(block))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    return digest.hexdigest()


def _checksum(array: np.ndarray) -> int:
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return zlib.crc32(flat)


def _file_checksum(path: Path, start: int) -> int:
    """Of what stands behind the header. Read and not mapped, so that the check fills no memory."""
    crc32 = 0
    for block in blocks_of(path, start):
        crc32 = zlib.crc32(block, crc32)
    return crc32


def write(folder: Path, dataset: Dataset) -> None:
    """Write the data set under `folder`, whole or not at all. A cache that cannot be written is no error."""
    samples = dataset.samples
    assert isinstance(samples, FlatSamples)
    meta = {
        "files": samples.files,
        "tally": asdict(dataset.tally),
        "crc32": {name: _checksum(getattr(samples, name)) for name in ARRAYS},
    }
    try:
        with atomic_folder(folder) as temporary:
            for name in ARRAYS:
                np.save(temporary / f"{name}.npy", getattr(samples, name))
            write_record(temporary, meta)
    except (UserError, OSError):
        pass


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Say what a cache's arrays are; the last file of a cache."""
    (folder / "meta.json").write_text(json.dumps(record) + "\n", encoding="utf-8")


def read(folder: Path, tokenizer: Any) -> Dataset | None:
    """The data set under `folder` with its arrays mapped from disk, or None. One whose checksums do not hold
    is removed."""
    if not folder.is_dir():
        return None
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
        plain = {name: array.view(np.ndarray) for name, array in arrays.items()}  # cheaper to cut
        samples = FlatSamples(**plain, files=tuple(meta["files"]))
        tally = Tally(**meta["tally"])
        tally.skipped = [(origin, reason) for origin, reason in tally.skipped]
        whole = samples.offsets[-1] == len(samples.input_ids) == len(samples.loss_mask) and all(
            _file_checksum(folder / f"{name}.npy", array.offset) == meta["crc32"][name]
            for name, array in arrays.items()
        )
        if whole:
            return Dataset(samples, tokenizer, tally)
    except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    return None


def first(dataset: Dataset, limit: int | None) -> Dataset:
    """The first `limit` samples."""
    samples = dataset.samples
    if limit is None or limit >= len(samples):
        return dataset
    assert isinstance(samples, FlatSamples)
    end = int(samples.offsets[limit])
    cut = FlatSamples(
        samples.input_ids[:end],
        samples.loss_mask[:end],
        samples.offsets[: limit + 1],
        samples.files,
        samples.places[:limit],
    )
    return replace(dataset, samples=cut)
