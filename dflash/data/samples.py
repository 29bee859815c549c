"""Rows of conversations or token ids -> tokenised samples with a loss mask, a few hundred at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dflash.config import DataConfig
from dflash.data.dataset import Tally, has_pair
from dflash.data.encode import Encoder
from dflash.data.messages import conversation_of
from dflash.data.rows import RawRow
from dflash.data.template import BadSample, ChatRenderer, Rendered
from dflash.data.thoughts import Thoughts
from steptime.errors import UserError

CHUNK = 512
"""Conversations tokenised in one call, so that the tokenizer's own threads have work."""
CHUNK_CHARACTERS = 4 << 20
"""Fewer of them when they are long."""


class Sink(Protocol):
    """Where samples go."""

    def add(self, ids: np.ndarray, mask: np.ndarray, file: str, line: int) -> None:
        """One sample: int32 and bool `[tokens]`, and where it stood."""
        ...

    def __len__(self) -> int: ...


class SampleReader:
    """Turns rows into samples, chunk by chunk: it holds one chunk, whatever it has read.

    Args:
        config: max_length, reasoning, turns, skip_bad.
        tokenizer: may be None for rows of token ids.
        vocab_size: ids must be below it.
        sink: gets the samples, in order of the rows.

    Attributes:
        tally: what was cut and left out.
    """

    def __init__(
        self, config: DataConfig, tokenizer: Any, vocab_size: int | None, sink: Sink, tally: Tally
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.sink, self.tally = sink, tally
        self._characters = 0
        self._renderer: ChatRenderer | None = None
        self._encoder: Encoder | None = None
        self._thoughts: Thoughts | None = None

    def read(self, path: Path, rows: Iterable[RawRow], limit: int | None = None) -> bool:
        """Add the rows' samples; false once the sink holds `limit`.

        Raises:
            UserError: a bad line, named; with `skip_bad` it is counted instead.
        """
        waiting: list[tuple[int, Rendered]] = []
        for row in rows:
            try:
                self._one(path, row, waiting)
            except BadSample as error:
                self._bad(path, row.line, str(error))
            if (
                len(waiting) >= CHUNK
                or self._characters >= CHUNK_CHARACTERS
                or (limit is not None and len(self.sink) + len(waiting) >= limit)
            ):
                self._flush(path, waiting)
                if limit is not None and len(self.sink) >= limit:
                    return False
        self._flush(path, waiting)
        return limit is None or len(self.sink) < limit

    def _bad(self, path: Path, line: int, reason: str) -> None:
        if not self.config.skip_bad:
            raise UserError(f"{path}:{line}: {reason}")
        self.tally.leave_out(f"{path}:{line}", reason)

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
        self._characters += len(rendered.text)

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
        self._characters = 0

    def _add(self, path: Path, line: int, ids: np.ndarray, mask: np.ndarray) -> None:
        longest = self.config.max_length
        if not has_pair(mask[:longest]):
            self.tally.dropped += 1
            reason = f"no two supervised tokens in a row within the first {longest}"
            self.tally.leave_out(f"{path}:{line}", reason)
            return
        self.tally.cut += len(ids) > longest
        self.sink.add(ids[:longest], mask[:longest], str(path), line)


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
