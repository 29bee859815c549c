"""Thoughts put where a chat template wants them: in `reasoning_content`, or in the content, and an empty pair
`<think></think>` that the target wrote is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from dflash.data.skeleton import Message
from dflash.data.template import EMPTY_PAIR, BadSample, ChatRenderer

_NAMES = ("reasoning_content", "thinking", ".reasoning")
_ANSWER = "Xq99999cQx"

EmptyWay = Literal["template", "content", "left out"]


def answer_text(content: str) -> str:
    """The content without an empty pair at its start."""
    pair = EMPTY_PAIR.match(content)
    return content[pair.end() :] if pair else content


class Thoughts:
    """Fits conversations to one tokenizer's templates.

    A template that knows no thoughts gets them written into the content. An empty pair stands in the content
    (as `messages.normalise` leaves it); a template that writes such a pair by itself gets an empty
    `reasoning_content` for it, and every other template the pair as the target wrote it. Only a template that
    takes the pair out of the content does without.

    Args:
        renderer: of the tokenizer.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._known: dict[str, bool] = {}
        self._empty: dict[str, EmptyWay] = {}

    def __call__(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[Message]:
        template = self._renderer.template(tools)
        if template not in self._known:
            self._known[template] = any(name in template for name in _NAMES)
        known = self._known[template]
        asked = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
        return [
            self._fit(message, template, known, index > asked) if message["role"] == "assistant" else message
            for index, message in enumerate(messages)
        ]

    def _fit(self, message: Message, template: str, known: bool, last: bool) -> Message:
        thoughts = message.get("reasoning_content")
        if thoughts:
            return message if known else _written(message, thoughts)
        pair = EMPTY_PAIR.match(message["content"])
        if pair is None or not message["content"][pair.end() :].strip():
            return message
        way = self._way_of_empty(template, known)
        if way == "content" and (last or not known):
            return message
        rest = {**message, "content": message["content"][pair.end() :]}
        return {**rest, "reasoning_content": ""} if way == "template" else rest

    def _way_of_empty(self, template: str, known: bool) -> EmptyWay:
        if template not in self._empty:
            self._empty[template] = (
                "template"
                if known and "</think>" in self._probe({"content": _ANSWER, "reasoning_content": ""})
                else "content"
                if f"<think>\n\n</think>\n\n{_ANSWER}"
                in self._probe({"content": f"<think>\n\n</think>\n\n{_ANSWER}"})
                else "left out"
            )
        return self._empty[template]

    def _probe(self, answer: Message) -> str:
        messages = [{"role": "user", "content": "Hi?"}, {"role": "assistant", **answer}]
        try:
            return self._renderer.render(messages)
        except BadSample:
            return ""


def _written(message: Message, thoughts: str) -> Message:
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    return {**rest, "content": f"<think>\n{thoughts}\n</think>\n\n{message['content']}"}
