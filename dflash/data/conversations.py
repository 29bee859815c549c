"""Files of conversations or token ids -> tokenised samples with a loss mask."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash.config import Config, DataConfig
from dflash.data import token_cache
from dflash.data.corpus import ensure_stdlib
from dflash.data.dataset import Dataset, FlatBuilder, has_pair, pack
from dflash.data.encode import Encoder
from dflash.data.messages import conversation_of
from dflash.data.progress import Progress
from dflash.data.template import BadSample, ChatRenderer, Rendered
from dflash.data.thoughts import Thoughts
from dflash.data.tokenizer import read_tokenizer
from steptime.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHUNK = 512
"""Conversations tokenised in one call, so that the tokenizer's own threads have work."""

CACHED_FROM_S = 1.0
"""Data sets that take longer to tokenise are kept under `data.cache`."""

SUFFIXES = (".jsonl", ".json", ".parquet")


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
        dataset = _tokenise(config, tokenizer, limit, vocab_size, files, folder)
    dataset = token_cache.first(dataset, limit)
    if not len(dataset.samples):
        left_out = (
            f" ({len(dataset.skipped):,} left out, the first: {': '.join(dataset.skipped[0])})"
            if dataset.skipped
            else ""
        )
        raise UserError(f"{path}: the data set is empty{left_out}")
    if config.pack:
        return replace(dataset, samples=pack(dataset.samples, config.max_length))
    return dataset


def _tokenise(
    config: DataConfig,
    tokenizer: Any,
    limit: int | None,
    vocab_size: int | None,
    files: list[Path],
    folder: Path,
) -> Dataset:
    """Read the files; what took long and is complete goes to the cache."""
    began = time.monotonic()
    reader = _Reader(config, tokenizer, vocab_size)
    complete = all(reader.read(file, limit) for file in files)
    dataset = Dataset(reader.builder.build(), reader.skipped, tokenizer, reader.cut, reader.dropped)
    if complete and len(dataset.samples) and time.monotonic() - began > CACHED_FROM_S:
        token_cache.write(folder, dataset)
    return dataset


def stdlib_file(config: DataConfig, tokenizer: Any, split: str) -> Path:
    """The standard library's conversations: those that the tokenizer was trained with, when it was."""
    beside = Path(getattr(tokenizer, "name_or_path", "") or ".").parent / f"{split}.jsonl"
    return (
        beside if (beside.parent / "meta.json").is_file() else ensure_stdlib(config.cache) / f"{split}.jsonl"
    )


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


def read_rows(path: Path, cache: str | Path = "cache") -> Iterator[RawRow]:
    """The rows of a JSONL, JSON-array or Parquet file. Broken lines come with their reason.

    Raises:
        UserError: a file that cannot be read at all.
    """
    try:
        if path.suffix == ".parquet":
            yield from _parquet_rows(path, cache)
            return
        with path.open("rb") as file:
            if file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
                file.seek(0)
                yield from _array_rows(path, file.read())
                return
            file.seek(0)
            for line, raw in enumerate(file, 1):
                if not raw.isspace():
                    yield _json_row(line, raw)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


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


def _parquet_rows(path: Path, cache: str | Path) -> Iterator[RawRow]:
    import datasets
    from pyarrow import ArrowException

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        table = datasets.Dataset.from_parquet(str(path), cache_dir=str(Path(cache) / "datasets"))
    except (ArrowException, datasets.exceptions.DatasetsError, ValueError) as error:
        raise UserError(f"{path}: not a readable Parquet file: {str(error).splitlines()[0]}") from None
    finally:
        if shown:
            datasets.enable_progress_bars()
    share = path.stat().st_size // max(len(table), 1)
    number = 0
    try:
        for number, value in enumerate(table, 1):
            yield RawRow(number, value, bytes=share)
    except UnicodeDecodeError:  # the reader of many rows gave up; one by one the others still come
        for place in range(number, len(table)):
            try:
                yield RawRow(place + 1, table[place], bytes=share)
            except UnicodeDecodeError as error:
                yield RawRow(place + 1, None, f"not valid UTF-8 (byte {error.start + 1})", share)


class _Reader:
    """Turns rows into samples, chunk by chunk. Lives for one call of `load_samples`."""

    def __init__(self, config: DataConfig, tokenizer: Any, vocab_size: int | None) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.builder = FlatBuilder()
        self.skipped: list[tuple[str, str]] = []
        self.cut = 0
        self.dropped = 0
        self._renderer: ChatRenderer | None = None
        self._encoder: Encoder | None = None
        self._thoughts: Thoughts | None = None

    def read(self, path: Path, limit: int | None) -> bool:
        """Add the file's samples; false once the limit is reached."""
        waiting: list[tuple[int, Rendered]] = []
        with Progress(f"Tokenising {path.name}", path.stat().st_size, "bytes") as progress:
            for row in read_rows(path, self.config.cache):
                progress.advance(row.bytes)
                try:
                    self._one(path, row, waiting)
                except BadSample as error:
                    self._bad(path, row.line, str(error))
                if len(waiting) >= CHUNK or (limit is not None and len(self.builder) + len(waiting) >= limit):
                    self._flush(path, waiting)
                    if limit is not None and len(self.builder) >= limit:
                        return False
            self._flush(path, waiting)
        return limit is None or len(self.builder) < limit

    def _bad(self, path: Path, line: int, reason: str) -> None:
        if not self.config.skip_bad:
            raise UserError(f"{path}:{line}: {reason}")
        self.skipped.append((f"{path}:{line}", reason))

    def _one(self, path: Path, row: RawRow, waiting: list[tuple[int, Rendered]]) -> None:
        if row.value is None:
            raise BadSample(row.reason or "empty line")
        if not isinstance(row.value, Mapping):
            raise BadSample(f"a {type(row.value).__name__} where an object is expected")
        if row.value.get("input_ids") is not None:
            ids, mask = token_ids_of(row.value, self.vocab_size)
            self._flush(path, waiting)  # keeps the file's order
            self._add(path, row.line, ids, mask)
            return
        conversation = conversation_of(row.value)
        if conversation is None:
            raise BadSample(unknown_format(path, row.value))
        messages, tools = conversation
        renderer = self._chat()
        assert self._thoughts is not None
        rendered = renderer(self._thoughts(messages, tools), tools)
        if row.value.get("finished") is False:  # a regenerated answer that ran into its limit
            rendered = renderer.without_stop(rendered)
        waiting.append((row.line, rendered))

    def _chat(self) -> ChatRenderer:
        if self.tokenizer is None:
            raise UserError("conversations need a tokenizer: --set data.tokenizer=FOLDER")
        if self._renderer is None:
            self._renderer = ChatRenderer(self.tokenizer, self.config.reasoning, self.config.turns)
            self._encoder = Encoder(self.tokenizer)
            self._thoughts = Thoughts(self._renderer)
        return self._renderer

    def _flush(self, path: Path, waiting: list[tuple[int, Rendered]]) -> None:
        if not waiting:
            return
        assert self._encoder is not None
        encoded = self._encoder([rendered for _, rendered in waiting])
        for (line, _), (ids, mask) in zip(waiting, encoded, strict=True):
            try:
                _check_ids(ids, self.vocab_size)
                self._add(path, line, ids, mask)
            except BadSample as error:
                self._bad(path, line, str(error))
        waiting.clear()

    def _add(self, path: Path, line: int, ids: np.ndarray, mask: np.ndarray) -> None:
        longest = self.config.max_length
        if not has_pair(mask[:longest]):
            self.dropped += 1
            self.skipped.append(
                (f"{path}:{line}", f"no two supervised tokens in a row within the first {longest}")
            )
            return
        self.cut += len(ids) > longest
        self.builder.add(ids[:longest], mask[:longest], str(path), line)


def token_ids_of(row: Mapping[str, Any], vocab_size: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Ready token ids and their mask.

    Raises:
        BadSample: no mask, lengths that differ, values that are no ids, ids outside the vocabulary.
    """
    raw, flags = row["input_ids"], row.get("loss_mask")
    if flags is None:
        raise BadSample(f"'input_ids' without 'loss_mask' (found: {', '.join(row)})")
    try:
        ids, mask = np.array(raw), np.array(flags)
    except ValueError:
        raise BadSample("'input_ids' and 'loss_mask' must be flat lists") from None
    if ids.ndim != 1 or mask.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
        raise BadSample("'input_ids' must be a flat list of integers, 'loss_mask' one of 0 and 1")
    if len(ids) != len(mask):
        raise BadSample(f"'input_ids' has {len(ids)} entries, 'loss_mask' {len(mask)}")
    if mask.dtype.kind not in "biuf" or not np.isin(mask, (0, 1)).all():
        raise BadSample("'loss_mask' may hold only 0 and 1")
    if not mask.any():
        raise BadSample("no assistant text: 'loss_mask' is all 0")
    _check_ids(ids, vocab_size)
    return ids.astype(np.int32), mask.astype(bool)


def _check_ids(ids: np.ndarray, vocab_size: int | None) -> None:
    wrong = np.flatnonzero((ids < 0) | (ids >= (vocab_size if vocab_size is not None else 2**31 - 1)))
    if len(wrong):
        first = int(wrong[0])
        raise BadSample(
            f"token id {int(ids[first])} at position {first} is outside the vocabulary of {vocab_size}"
        )


def unknown_format(path: Path, row: Mapping[str, Any]) -> str:
    texts = [name for name, value in row.items() if isinstance(value, str)]
    user = next(
        (name for name in ("question", "prompt", "instruction", "input", "query") if name in texts), None
    )
    answers = ("answer", "response", "output", "completion", "solution", "canonical_solution", "chosen")
    assistant = next((name for name in answers if name in texts), None)
    return (
        f"no 'conversations', 'messages' or 'input_ids' (found: {', '.join(map(str, row)) or 'nothing'}); "
        f"convert with `dflash prepare --from {path} --user {user or 'FIELD'} --assistant "
        f"{assistant or 'FIELD'} --out FILE`"
    )
