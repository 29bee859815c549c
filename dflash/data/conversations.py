"""Files of conversations or token ids -> tokenised samples with a loss mask."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash.config import Config, DataConfig
from dflash.data import token_cache
from dflash.data.corpus import ensure_stdlib
from dflash.data.dataset import Dataset, FlatBuilder, Tally, pack
from dflash.data.large import tokenise_large
from dflash.data.progress import Progress
from dflash.data.rows import RawRow, data_files, read_rows
from dflash.data.samples import SampleReader
from dflash.data.tokenizer import read_tokenizer
from steptime.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CACHED_FROM_S = 1.0
"""Data sets that take longer to tokenise are kept under `data.cache`."""
LARGE_FROM_BYTES = 32 << 20
"""Data sets of so many bytes are tokenised on disk, in parallel, and can be gone on with."""


def load_tokenizer(config: Config) -> Any:
    """The tokenizer of a run: `data.tokenizer`, else the target's own; the built-in target has the corpus's.

    Raises:
        UserError: none could be loaded or built.
    """
    if config.data.tokenizer:
        return read_tokenizer(config.data.tokenizer)
    if config.target.model == "tiny-hybrid":
        return read_tokenizer(ensure_stdlib(config.data.cache, config.target.tiny.vocab_size) / "tokenizer")
    return read_tokenizer(config.target.model, "target.model")


def open_data(
    config: Config, split: str = "train", limit: int | None = None, vocab_size: int | None = None
) -> Dataset:
    """The data set of a run: builds the standard-library corpus when asked for, loads the tokenizer,
    tokenises.

    Args:
        config: `data.tokenizer` wins; else the built-in target and the `stdlib` corpus share a tokenizer of
            `target.tiny.vocab_size` tokens, and any other target brings its own.
        split: `train` or `heldout`, for the `stdlib` corpus only.
        limit: use only the first so many samples.
        vocab_size: rows of the target's embedding; None checks ids against the tokenizer alone.

    Raises:
        UserError: anything wrong with the file, the tokenizer or the conversations.
    """
    tokenizer = load_tokenizer(config)
    if vocab_size is None and config.target.model == "tiny-hybrid":
        vocab_size = config.target.tiny.vocab_size
    return load_samples(config.data, tokenizer, limit, vocab_size, split)


def load_samples(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerFast | None,
    limit: int | None = None,
    vocab_size: int | None = None,
    split: str = "train",
) -> Dataset:
    """Read, render, tokenise, cut to `config.max_length`, and pack if asked.

    Args:
        config: path, max_length, reasoning, turns, pack, skip_bad.
        tokenizer: may be None for files of token ids.
        limit: stop after so many samples.
        vocab_size: ids must be below it; None takes the tokenizer's size.
        split: `train` or `heldout`, for the path `stdlib` only.

    Raises:
        UserError: one line with file, line and reason; with `skip_bad`, bad lines are listed in the result
            instead.
    """
    if vocab_size is None and tokenizer is not None:
        vocab_size = len(tokenizer)
    path = stdlib_file(config, tokenizer, split) if config.path == "stdlib" else Path(config.path)
    files = data_files(path)
    folder = token_cache.cache_folder(config, files, tokenizer, vocab_size)
    dataset = token_cache.read(folder, tokenizer)
    if dataset is None:
        if limit is None and sum(file.stat().st_size for file in files) >= LARGE_FROM_BYTES:
            dataset = tokenise_large(config, tokenizer, vocab_size, files, folder)
        else:
            dataset = _tokenise(config, tokenizer, limit, vocab_size, files, folder)
    dataset = token_cache.first(dataset, limit)
    if not len(dataset.samples):
        tally = dataset.tally
        left_out = (
            f" ({tally.left_out:,} left out, the first: {': '.join(tally.skipped[0])})"
            if tally.skipped
            else ""
        )
        raise UserError(f"{path}: the data set is empty{left_out}")
    if config.pack:
        return replace(dataset, samples=pack(dataset.samples, dataset.lengths, config.max_length))
    return dataset


def _tokenise(
    config: DataConfig,
    tokenizer: Any,
    limit: int | None,
    vocab_size: int | None,
    files: list[Path],
    folder: Path,
) -> Dataset:
    """Read the files into memory; what took long and is complete goes to the cache."""
    began = time.monotonic()
    builder, tally = FlatBuilder(), Tally()
    reader = SampleReader(config, tokenizer, vocab_size, builder, tally)
    complete = all(reader.read(file, _watched(file), limit) for file in files)
    dataset = Dataset(builder.build(), tokenizer, tally)
    if complete and len(dataset.samples) and time.monotonic() - began > CACHED_FROM_S:
        token_cache.write(folder, dataset)
    return dataset


def _watched(file: Path) -> Iterator[RawRow]:
    with Progress(f"Tokenising {file.name}", file.stat().st_size, "bytes") as progress:
        for row in read_rows(file):
            progress.advance(row.bytes)
            yield row


def stdlib_file(config: DataConfig, tokenizer: Any, split: str) -> Path:
    """The standard library's conversations: those that the tokenizer was trained with, when it was."""
    beside = Path(getattr(tokenizer, "name_or_path", "") or ".").parent / f"{split}.jsonl"
    return (
        beside if (beside.parent / "meta.json").is_file() else ensure_stdlib(config.cache) / f"{split}.jsonl"
    )
