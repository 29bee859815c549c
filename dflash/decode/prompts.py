"""Prompts to evaluate on: conversations up to the last answer, plain questions, or token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash.data.conversations import RawRow, data_files, read_rows, token_ids_of
from dflash.data.messages import conversation_of, normalise
from dflash.data.skeleton import Message
from dflash.data.template import BadSample, ChatRenderer
from dflash.data.thoughts import Thoughts
from steptime.errors import UserError


@dataclass(frozen=True, slots=True)
class EvalPrompt:
    """One prompt.

    Attributes:
        origin: `file:line`.
    """

    origin: str
    ids: tuple[int, ...]


def read_prompts(
    path: Path,
    tokenizer: Any,
    vocab_size: int,
    *,
    limit: int | None,
    context: int,
    max_new_tokens: int,
    cache: str | Path = "cache",
) -> list[EvalPrompt]:
    """The prompts of a JSONL, JSON or Parquet file.

    A row may hold a conversation (its last answer is left out), `prompt` (a user's question), or `input_ids`
    with `loss_mask` (the ids before the first supervised one).

    Args:
        tokenizer: with a chat template; may be None for token ids.
        limit: only the first so many.
        context: most tokens of prompt and answer; 0 for no limit.

    Raises:
        UserError: with file and line: a row that is none of these, or a prompt that does not fit the context.
    """
    reader = _Reader(tokenizer, vocab_size)
    prompts: list[EvalPrompt] = []
    for file in data_files(path):
        for row in read_rows(file, cache):
            if limit is not None and len(prompts) >= limit:
                return prompts
            origin = f"{file}:{row.line}"
            try:
                ids = reader.ids(row)
            except BadSample as error:
                raise UserError(f"{origin}: {error}") from None
            if context and len(ids) + max_new_tokens > context:
                raise UserError(
                    f"{origin}: the prompt has {len(ids)} tokens, with {max_new_tokens} new ones "
                    f"{len(ids) + max_new_tokens}: longer than the target's context of {context}; lower "
                    "--max-new-tokens or leave the prompt out"
                )
            prompts.append(EvalPrompt(origin, tuple(ids)))
    if not prompts:
        raise UserError(f"{path}: no prompts in it")
    return prompts


class _Reader:
    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self._renderer: ChatRenderer | None = None

    def ids(self, row: RawRow) -> list[int]:
        value = row.value
        if not isinstance(value, Mapping):
            raise BadSample(row.reason or "not an object")
        if value.get("input_ids") is not None:
            return self._from_ids(value)
        if isinstance(value.get("prompt"), str):
            return self._render([normalise({"role": "user", "content": value["prompt"]}, 1)], None)
        found = conversation_of(value)
        if found is None:
            raise BadSample(
                "no 'conversations', 'messages', 'prompt' or 'input_ids' (found: "
                f"{', '.join(map(str, value))})"
            )
        return self._render(*found)

    def _from_ids(self, value: Mapping[str, Any]) -> list[int]:
        ids, mask = token_ids_of(value, self.vocab_size)
        first = int(np.flatnonzero(mask)[0])
        if first == 0:
            raise BadSample("no prompt: 'loss_mask' begins with 1")
        return ids[:first].tolist()

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[int]:
        if self.tokenizer is None:
            raise UserError("conversations need a tokenizer: --set data.tokenizer=FOLDER")
        if self._renderer is None:
            self._renderer = ChatRenderer(self.tokenizer)
        messages = list(messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise BadSample("no prompt: the conversation holds nothing before the answer")
        messages = Thoughts(self._renderer)(messages, tools)
        text = self._renderer.render(messages, tools, add_generation_prompt=True)
        ids = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        if max(ids, default=0) >= self.vocab_size:
            raise BadSample(f"token id {max(ids)} is outside the target's vocabulary of {self.vocab_size}")
        return ids
