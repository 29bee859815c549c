"""Prompts to evaluate on: conversations up to the last answer, plain questions, or token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dflash.data.encode import Encoder
from dflash.data.messages import conversation_of, normalise
from dflash.data.rows import RawRow, data_files, read_rows
from dflash.data.samples import token_ids_of
from dflash.data.skeleton import Message
from dflash.data.template import BadSample, ChatRenderer
from dflash.data.thoughts import Thoughts
from dflash.models.target import Target
from steptime.errors import UserError


@dataclass(frozen=True, slots=True)
class EvalPrompt:
    """One prompt.

    Attributes:
        origin: `file:line`.
        data_ids, data_mask: the data's own text, rendered as training renders it, and which of its tokens are
            the last answer's; empty where the row holds no answer.
        thinks: the data's answer has a thought that is not empty; None where it is not known.
    """

    origin: str
    ids: tuple[int, ...]
    data_ids: tuple[int, ...] = ()
    data_mask: tuple[bool, ...] = ()
    thinks: bool | None = None


def read_prompts(
    path: Path,
    tokenizer: Any,
    vocab_size: int,
    *,
    limit: int | None,
    context: int,
    max_new_tokens: int,
    cache: str | Path = "cache",
    longest: int = 0,
    reasoning: str = "train",
    thinking: bool | None = None,
) -> list[EvalPrompt]:
    """The prompts of a JSONL, JSON or Parquet file.

    A row may hold a conversation (its last answer is left out), `prompt` (a user's question), or `input_ids`
    with `loss_mask` (the ids before the first supervised one).

    Args:
        tokenizer: with a chat template; may be None for token ids.
        limit: only the first so many.
        context: most tokens of prompt and answer; 0 for no limit.
        longest: most tokens of the data's own text, as `data.max_length`; 0: the context.
        reasoning: as `data.reasoning`.
        thinking: passed to the template of the prompt as `enable_thinking` unless None.

    Raises:
        UserError: with file and line: a row that is none of these, or a prompt that does not fit the context.
    """
    reader = _Reader(tokenizer, vocab_size, longest or context, reasoning, thinking)
    prompts: list[EvalPrompt] = []
    for file in data_files(path):
        for row in read_rows(file):
            if limit is not None and len(prompts) >= limit:
                return prompts
            origin = f"{file}:{row.line}"
            try:
                prompt = reader.prompt(origin, row)
            except BadSample as error:
                raise UserError(f"{origin}: {error}") from None
            size = len(prompt.ids)
            if context and size + max_new_tokens > context:
                raise UserError(
                    f"{origin}: the prompt has {size} tokens, with {max_new_tokens} new ones "
                    f"{size + max_new_tokens}: longer than the target's context of {context}; lower "
                    "--max-new-tokens or leave the prompt out"
                )
            prompts.append(prompt)
    if not prompts:
        raise UserError(f"{path}: no prompts in it")
    return prompts


def stop_ids(target: Target, tokenizer: Any) -> list[int]:
    """What ends a text: the ids that the target's config, its generation settings and the tokenizer name."""
    known = getattr(getattr(target.model, "generation_config", None), "eos_token_id", None)
    found = {
        *target.info.eos_ids,
        *(known if isinstance(known, list) else [known]),
        getattr(tokenizer, "eos_token_id", None),
    }
    return sorted(int(i) for i in found if i is not None)


class _Reader:
    def __init__(
        self, tokenizer: Any, vocab_size: int, longest: int, reasoning: str, thinking: bool | None
    ) -> None:
        self.tokenizer, self.vocab_size, self.longest = tokenizer, vocab_size, longest
        self._reasoning = reasoning
        self._variables = {} if thinking is None else {"enable_thinking": thinking}

    def prompt(self, origin: str, row: RawRow) -> EvalPrompt:
        value = row.value
        if not isinstance(value, Mapping):
            raise BadSample(row.reason or "not an object")
        if value.get("input_ids") is not None:
            return self._from_ids(origin, value)
        if isinstance(value.get("prompt"), str):
            return self._render(origin, [normalise({"role": "user", "content": value["prompt"]}, 1)], None)
        found = conversation_of(value)
        if found is None:
            raise BadSample(
                "no 'conversations', 'messages', 'prompt' or 'input_ids' (found: "
                f"{', '.join(map(str, value))})"
            )
        return self._render(origin, *found)

    def _from_ids(self, origin: str, value: Mapping[str, Any]) -> EvalPrompt:
        ids, mask = token_ids_of(value, self.vocab_size)
        first = int(np.flatnonzero(mask)[0])
        if first == 0:
            raise BadSample("no prompt: 'loss_mask' begins with 1")
        return EvalPrompt(origin, tuple(ids[:first].tolist()), *self._cut(ids, mask))

    def _render(self, origin: str, messages: Sequence[Message], tools: Sequence[Any] | None) -> EvalPrompt:
        if self.tokenizer is None:
            raise UserError("conversations need a tokenizer: --set data.tokenizer=FOLDER")
        whole = self._thoughts(messages, tools)
        asked = list(messages)
        while asked and asked[-1]["role"] == "assistant":
            asked.pop()
        if not asked:
            raise BadSample("no prompt: the conversation holds nothing before the answer")
        text = self._renderer.render(
            self._thoughts(asked, tools), tools, add_generation_prompt=True, **self._variables
        )
        ids = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        self._check(ids)
        if len(asked) == len(messages):
            return EvalPrompt(origin, tuple(ids))
        thinks = any(message.get("reasoning_content") for message in messages[len(asked) :])
        return EvalPrompt(origin, tuple(ids), *self._answer(whole, tools), thinks)

    def _answer(
        self, messages: Sequence[Message], tools: Sequence[Any] | None
    ) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """The data's own text and the mask of its last answer; empty where training could not use it."""
        try:
            ids, mask = self._encoder([self._renderer(messages, tools)])[0]
            self._check(ids.tolist())
        except BadSample:
            return (), ()
        return self._cut(ids, mask)

    def _cut(self, ids: np.ndarray, mask: np.ndarray) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        longest = self.longest or len(ids)
        if not mask[:longest].any():
            return (), ()
        return tuple(ids[:longest].tolist()), tuple(mask[:longest].tolist())

    def _check(self, ids: Sequence[int]) -> None:
        if max(ids, default=0) >= self.vocab_size:
            raise BadSample(f"token id {max(ids)} is outside the target's vocabulary of {self.vocab_size}")

    @cached_property
    def _renderer(self) -> ChatRenderer:
        return ChatRenderer(self.tokenizer, self._reasoning, "last")

    @cached_property
    def _thoughts(self) -> Thoughts:
        return Thoughts(self._renderer)

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder(self.tokenizer)
