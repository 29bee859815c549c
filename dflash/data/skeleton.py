"""What a template writes around the texts of conversations of one shape: its own pieces, and where they lie.

The template is rendered with unique words in place of the texts. `split` takes such a rendering apart at the
words, and `match` finds the pieces again in a real rendering, character for character."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
WORD = re.compile(r"Xq(\d{5})([crn])Qx")

# What a template does to a text before it shows it: nothing, some trimming, or JSON's escapes.
VARIANTS: tuple[Callable[[str], str], ...] = (
    lambda text: text,
    lambda text: text.strip(),
    lambda text: text.lstrip("\n"),
    lambda text: text.rstrip(),
    lambda text: text.strip("\n"),
    lambda text: text.lstrip(),
    lambda text: text.rstrip("\n"),
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
)


@dataclass(frozen=True, slots=True)
class Skeleton:
    """What a template adds around the texts of conversations of one shape.

    Attributes:
        literals: the template's own pieces; one more than placeholders.
        placeholders: (message index, kind) of the text after each literal but the last.
        turns: for each assistant message: (literal index, offset) where it starts and where it ends.
    """

    literals: tuple[str, ...]
    placeholders: tuple[tuple[int, str], ...]
    turns: tuple[tuple[tuple[int, int], tuple[int, int]], ...]


def common_prefix(one: str, other: str) -> str:
    length = next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    return one[:length]


def shape_of(message: Message) -> Message:
    """The message without its texts: equal shapes get equal pieces from a template."""
    texts: Message = {
        name: bool(message[name]) for name in ("content", "reasoning_content") if name in message
    }
    return {**message, **texts}


def with_words(index: int, message: Message) -> Message:
    result = dict(message)
    for name, kind in (("content", "c"), ("reasoning_content", "r")):
        if message.get(name):
            result[name] = f"Xq{index:05d}{kind}Qx"
    if message.get("tool_calls"):
        first, *others = message["tool_calls"]
        result["tool_calls"] = [
            {**first, "function": {**first["function"], "name": f"Xq{index:05d}nQx"}},
            *others,
        ]
    return result


def split(text: str) -> tuple[list[str], list[tuple[int, str]]]:
    parts = WORD.split(text)
    return parts[::3], [(int(index), kind) for index, kind in zip(parts[1::3], parts[2::3], strict=True)]


def _text_of(message: Mapping[str, Any], kind: str) -> str:
    if kind == "n":
        return message["tool_calls"][0]["function"]["name"]
    return message["content" if kind == "c" else "reasoning_content"]


def match(text: str, skeleton: Skeleton, messages: Sequence[Message]) -> list[int] | None:
    """Start of every literal in `text`, or None when `text` is not the literals with the messages' texts
    between."""
    literals = skeleton.literals
    if not text.startswith(literals[0]):
        return None
    places, position = [0], len(literals[0])
    for (index, kind), literal in zip(skeleton.placeholders, literals[1:], strict=True):
        raw = _text_of(messages[index], kind)
        for variant in VARIANTS:
            shown = variant(raw)
            after = position + len(shown)
            if text.startswith(shown, position) and text.startswith(literal, after):
                break
        else:
            return None
        places.append(after)
        position = after + len(literal)
    return places if position == len(text) else None
