"""Tokenised data sets on disk, so that a file is tokenised once and not at every start."""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash.config import DataConfig
from dflash.data.dataset import Dataset, FlatSamples
from dflash.data.progress import Progress
from steptime.errors import UserError
from steptime.files import atomic_folder

FORMAT = 2
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


def write(folder: Path, dataset: Dataset) -> None:
    """Write the data set under `folder`, whole or not at all. A cache that cannot be written is no error."""
    samples = dataset.samples
    assert isinstance(samples, FlatSamples)
    meta = {
        "files": samples.files,
        "skipped": dataset.skipped,
        "cut": dataset.cut,
        "dropped": dataset.dropped,
        "crc32": {name: _checksum(getattr(samples, name)) for name in ARRAYS},
    }
    try:
        with atomic_folder(folder) as temporary:
            for name in ARRAYS:
                np.save(temporary / f"{name}.npy", getattr(samples, name))
            (temporary / "meta.json").write_text(json.dumps(meta) + "\n", encoding="utf-8")
    except (UserError, OSError):
        pass


def read(folder: Path, tokenizer: Any) -> Dataset | None:
    """The data set under `folder` with its arrays mapped from disk, or None. One whose checksums do not hold
    is removed."""
    if not folder.is_dir():
        return None
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
        samples = FlatSamples(**arrays, files=tuple(meta["files"]))
        skipped = [(origin, reason) for origin, reason in meta["skipped"]]
        whole = samples.offsets[-1] == len(samples.input_ids) == len(samples.loss_mask) and all(
            _checksum(array) == meta["crc32"][name] for name, array in arrays.items()
        )
        if whole:
            return Dataset(samples, skipped, tokenizer, meta["cut"], meta["dropped"])
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
