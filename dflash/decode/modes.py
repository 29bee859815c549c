"""Whether answers think: the target's own, those of the prompts' file, and those of the training data."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash.config import Config
from dflash.data.messages import conversation_of
from dflash.data.rows import data_files, read_rows
from dflash.data.template import BadSample
from dflash.decode.between import Modes, has_thought
from dflash.decode.figures import PromptResult
from dflash.decode.prompts import EvalPrompt
from steptime.errors import UserError

_LOOKED_AT = 64
"""Conversations of the training data that are looked at."""


def modes_of(
    tokenizer: Any,
    prompts: Sequence[EvalPrompt],
    results: Sequence[PromptResult],
    asked: bool | None,
    trained: Config | None,
) -> Modes:
    """Who thinks.

    Args:
        tokenizer: None for ready token ids: then nothing is known.
        prompts, results: in the same order.
        asked: what the user asked of the template.
        trained: the settings of the drafter's training, where they are known.
    """
    if tokenizer is None:
        return Modes(asked)
    ends = [tokenizer.decode(list(prompt.ids[-12:])).rstrip() for prompt in prompts]
    opened = [end.endswith("<think>") for end in ends]
    own = [
        has_thought(("<think>" if begun else "") + tokenizer.decode(list(result.tokens)))
        for begun, result in zip(opened, results, strict=True)
    ]
    data = [prompt.thinks for prompt in prompts if prompt.thinks is not None]
    closed = sum(end.endswith("</think>") for end in ends)
    return Modes(
        asked=asked,
        prompt="opens one"
        if sum(opened) * 2 > len(prompts)
        else "closes an empty one"
        if closed * 2 > len(prompts)
        else "nothing",
        own=_share(own),
        data=_share(data),
        training=None if trained is None else training_share(trained),
    )


def training_share(config: Config) -> float | None:
    """Share of the first conversations of the training data with a thought in an answer; None where the file
    is not there or holds no conversations."""
    if config.data.path == "stdlib":
        return 0.0
    try:
        file = data_files(Path(config.data.path))[0]
        thinks = [
            any(message.get("reasoning_content") for message in found[0])
            for row in itertools.islice(read_rows(file), _LOOKED_AT)
            if (found := _conversation(row.value)) is not None
        ]
    except UserError:
        return None
    return _share(thinks)


def _conversation(value: Any) -> tuple[list[Any], Any] | None:
    try:
        return conversation_of(value) if isinstance(value, dict) else None
    except BadSample:
        return None


def _share(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None
