"""A chat rendered with a template, and which characters of it are the assistant's, proven rather than
guessed.

Templates with `{% generation %}` say it themselves. For the others the template is rendered once more with
unique words in place of all texts; the literal pieces between those words tell where a generation prompt ends
and where a turn ends, and the real rendering must equal those pieces with the real texts between them,
character for character."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from dflash.data.skeleton import (
    WORD,
    Message,
    Skeleton,
    common_prefix,
    match,
    shape_of,
    split,
    with_words,
)
from steptime.errors import UserError

Span = tuple[int, int]

EMPTY_PAIR = re.compile(r"\s*<think>\s*</think>\s*")
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
FIXED_DATE = (
    "26 Jul 2024"  # the date that Llama's templates fall back to; the clock's would change the data every day
)


_LONGEST_REASON = 1000


class BadSample(ValueError):
    """One conversation that cannot be used; the reader adds file and line.

    The reason becomes one line that any terminal can show, whatever the file holds: control characters and
    halves of characters are escaped, and a long reason is cut."""

    def __init__(self, reason: str) -> None:
        if len(reason) > _LONGEST_REASON:
            reason = f"{reason[: _LONGEST_REASON - 60]} ... {reason[-50:]}"
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in reason))


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: the whole rendering.
        spans: `[start, end)` characters that the loss covers, ascending, one or more.
    """

    text: str
    spans: tuple[Span, ...]


@dataclass
class ChatRenderer:
    """Renders conversations with a tokenizer's template and marks the assistant's part.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        reasoning: `train` or `mask` the text between `<think>` and `</think>`.
        turns: supervise `all` assistant turns or the `last` (everything after the last user's message).

    Raises:
        UserError: the tokenizer has no chat template.
    """

    tokenizer: Any
    reasoning: str = "train"
    turns: str = "all"
    _skeletons: dict[str, Skeleton] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.template(None)

    def template(self, tools: Sequence[Any] | None) -> str:
        """The template's source, by whether there are tools (some tokenizers have two)."""
        try:
            return self.tokenizer.get_chat_template(tools=tools)
        except ValueError:
            name = getattr(self.tokenizer, "name_or_path", "") or type(self.tokenizer).__name__
            raise UserError(
                f"tokenizer {name}: no chat template, so conversations cannot be rendered; give token ids "
                '({"input_ids", "loss_mask"}) or another --set data.tokenizer=...'
            ) from None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """The template's text for `messages`.

        Raises:
            BadSample: the template refuses them (roles that must alternate, say).
        """
        return self._render(messages, tools, False, add_generation_prompt, **variables)[0]

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        track: bool,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = cast(Any, render_jinja_template)(  # its annotation forgets the spans
                [list(messages)],
                tools=list(tools) if tools else None,
                chat_template=self.template(tools),
                return_assistant_tokens_mask=track,
                add_generation_prompt=add_generation_prompt,
                **{"date_string": FIXED_DATE, **self.tokenizer.special_tokens_map, **variables},
            )
        except Exception as error:  # a template is a program of somebody else's
            raise BadSample(
                "the chat template refuses it: "
                f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
            ) from None
        return texts[0], list(spans[0]) if spans else []

    def __call__(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Rendered:
        """Render a conversation (as `normalise` leaves it) and find the assistant's spans.

        Raises:
            BadSample: no assistant text, a template that refuses the conversation, or spans that cannot be
                proven.
        """
        speakers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not any(has_text(messages[index]) for index in speakers):
            raise BadSample("no assistant text")
        try:
            text, spans = self._spans(messages, tools)
        except BadSample as error:
            try:  # some templates want the arguments of a tool call as a string
                text, spans = self._spans([_with_written_arguments(message) for message in messages], tools)
            except BadSample:
                raise error from None
        if self.turns == "last":
            spans = self._last_turn(messages, speakers, spans)
        if self.reasoning == "mask":
            spans = [(after_reasoning(text, start, end), end) for start, end in spans]
            self._check_masked(messages, text, spans)
        spans = [span for span in spans if span[0] < span[1]]
        if not spans:
            raise BadSample("no assistant text left to train on")
        return Rendered(text, tuple(spans))

    def _spans(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> tuple[str, list[Span]]:
        if not GENERATION_TAG.search(self.template(tools)):
            return self._spans_by_words(messages, tools)
        text, spans = self._render(messages, tools, True)
        if not spans:
            raise BadSample(
                "the chat template marks no assistant text (its {% generation %} part is never reached)"
            )
        return text, [(start, self._without_trailing_space(text, start, end)) for start, end in spans]

    def without_stop(self, rendered: Rendered) -> Rendered:
        """The same without the last turn's end in the loss: for an answer that was cut off, where the model
        did not stop."""
        *others, (start, end) = rendered.spans
        text = rendered.text[start:end]
        stop = max((len(token) for token in self._specials if text.endswith(token)), default=0)
        return Rendered(rendered.text, (*others, (start, end - stop)))

    def _without_trailing_space(self, text: str, start: int, end: int) -> int:
        """The end of a span without the line feed that templates put behind the token that the model stops
        with."""
        stripped = text[start:end].rstrip()
        return start + len(stripped) if stripped.endswith(self._specials) else end

    def _check_masked(self, messages: Sequence[Message], text: str, spans: Sequence[Span]) -> None:
        for message in messages:
            thought = message.get("reasoning_content", "").strip()
            if thought and any(text.find(thought, start, end) >= 0 for start, end in spans):
                raise BadSample(
                    "the reasoning cannot be masked: this chat template puts it in no <think> block"
                )

    def _last_turn(self, messages: Sequence[Message], speakers: list[int], spans: list[Span]) -> list[Span]:
        asked = max(
            (index for index, message in enumerate(messages) if message["role"] == "user"), default=-1
        )
        count = sum(index > asked for index in speakers)
        if count == 0:
            raise BadSample("no assistant text after the last user's message")
        # A template that joins or splits messages breaks the count; its last span is still the last turn's.
        return spans[-count:] if len(spans) == len(speakers) else spans[-1:]

    def _spans_by_words(
        self, messages: Sequence[Message], tools: Sequence[Any] | None
    ) -> tuple[str, list[Span]]:
        text = self.render(messages, tools)
        key = json.dumps([[shape_of(message) for message in messages], tools], sort_keys=True, default=str)
        if WORD.search(key):
            return text, self._spans_by_prefixes(text, messages, tools)
        skeleton = self._skeletons.get(key)
        if skeleton is None:
            skeleton = self._make_skeleton(messages, tools)
            if len(self._skeletons) < 4096:
                self._skeletons[key] = skeleton
        places = match(text, skeleton, messages)
        if places is not None:
            spans = [(places[a] + da, places[b] + db) for (a, da), (b, db) in skeleton.turns]
        else:
            spans = self._spans_by_prefixes(text, messages, tools)
        return text, spans

    def _make_skeleton(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Skeleton:
        worded = [with_words(index, message) for index, message in enumerate(messages)]
        literals, placeholders = split(self.render(worded, tools))
        turns = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or not has_text(message):
                continue
            own = self._own_places(index, placeholders, worded, tools)
            if not own:
                calls = " (only tool calls, which it does not know)" if message.get("tool_calls") else ""
                raise BadSample(f"the chat template leaves out the assistant's message {index + 1}{calls}")
            first, last = min(own), max(own)
            start = (first, self._start_in(literals[first], worded[:index], tools))
            end = (last + 1, self._end_in(literals[last + 1], index, worded[: index + 1], tools))
            turns.append((start, end))
        return Skeleton(tuple(literals), tuple(placeholders), tuple(turns))

    def _own_places(
        self,
        index: int,
        placeholders: list[tuple[int, str]],
        worded: Sequence[Message],
        tools: Sequence[Any] | None,
    ) -> list[int]:
        """The placeholders of message `index` that stand in its own turn: as many as there are when it is the
        last message.

        Some templates name a function once more where they show its result.
        """
        alone = split(self.render(worded[: index + 1], tools))[1]
        places: list[int] = []
        for kind in "rcn":
            found = [place for place, placeholder in enumerate(placeholders) if placeholder == (index, kind)]
            places += found[: alone.count((index, kind))]
        return places

    def _start_in(self, literal: str, before: Sequence[Message], tools: Sequence[Any] | None) -> int:
        """Where in the piece before the assistant's words its own writing starts: after the generation
        prompt.

        The whole piece when the prompt is not to be recognised in it: then only the words themselves are
        supervised."""
        try:
            plain, prompt = (
                split(self.render(before, tools, add_generation_prompt=flag))[0][-1] for flag in (False, True)
            )
        except BadSample:
            return len(literal)
        return len(prompt) if prompt != plain and literal.startswith(prompt) else len(literal)

    def _end_in(self, literal: str, index: int, until: Sequence[Message], tools: Sequence[Any] | None) -> int:
        """Where in the piece after the assistant's words its turn ends: after the token that the model stops
        with.

        That is what the piece has in common with those of the conversation that ends here and of one that
        goes on: the start of the next turn differs, and so does what is only at the end of a conversation.
        """
        tails = []
        for messages in (until, [*until, {"role": "user", "content": "and?"}]):
            try:
                literals, placeholders = split(self.render(messages, tools))
                tails.append(
                    literals[
                        max(
                            place for place, placeholder in enumerate(placeholders) if placeholder[0] == index
                        )
                        + 1
                    ]
                )
            except BadSample:
                continue  # a tool call cannot be followed by a question in some templates
        common = literal
        for tail in tails:
            common = common_prefix(common, tail)
        ends = [common.rindex(token) + len(token) for token in self._specials if token in common]
        if ends:
            return max(ends)
        if tails and all(tail.startswith(self._specials) for tail in [literal, *tails]):
            return max(
                len(token) for token in self._specials if literal.startswith(token)
            )  # another one in the last turn
        return len(common.rstrip()) if tails and common == tails[0] else 0

    @cached_property
    def _specials(self) -> tuple[str, ...]:
        added = tuple(str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special)
        return added or tuple(token for token in self.tokenizer.all_special_tokens if token)

    def _spans_by_prefixes(
        self, text: str, messages: Sequence[Message], tools: Sequence[Any] | None
    ) -> list[Span]:
        """For templates that look into the texts: every shorter conversation must be a prefix of the whole
        one."""
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self.render(messages[:index], tools, add_generation_prompt=True)
            turn = self.render(messages[: index + 1], tools)
            if not (
                prompt != self.render(messages[:index], tools)
                and text.startswith(turn)
                and turn.startswith(prompt)
            ):
                raise BadSample(
                    "which part is the assistant's cannot be proven under this chat template; add {% "
                    "generation %} tags to it"
                )
            tail = turn[len(prompt) :]
            ends = [tail.rindex(token) + len(token) for token in self._specials if token in tail]
            spans.append((len(prompt), len(prompt) + (max(ends) if ends else len(tail.rstrip()))))
        return spans


def has_text(message: Message) -> bool:
    """Whether the message says anything: content, reasoning or a tool call."""
    return bool(
        EMPTY_PAIR.sub("", message.get("content", ""), count=1).strip()
        or message.get("reasoning_content", "").strip()
        or message.get("tool_calls")
    )


def after_reasoning(text: str, start: int, end: int) -> int:
    """Where the answer begins in an assistant's span: behind `</think>` and the white space after it.

    The opening tag may lie inside the span or, put there by the generation prompt, just before it.
    """
    found = re.compile(r"\s*(<think>)?.*?</think>\s*", re.DOTALL).match(text, start, end)
    if found and (found[1] or text[:start].rstrip().endswith("<think>")):
        return found.end()
    return start


def _with_written_arguments(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": written}})
    return {**message, "tool_calls": calls}
