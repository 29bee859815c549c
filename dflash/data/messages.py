"""One spelling for the conversations that people have: OpenAI's, ShareGPT's, with tools and with thoughts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dflash.data.skeleton import Message
from dflash.data.template import BadSample

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "ipython": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
KEPT = ("name", "tool_call_id")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


def conversation_of(row: Mapping[str, Any]) -> tuple[list[Message], list[Any] | None] | None:
    """The messages and tools of a row, or None when it holds no conversation.

    Raises:
        BadSample: a conversation in no known spelling.
    """
    turns = row.get("messages") if row.get("messages") is not None else row.get("conversations")
    if turns is None:
        turns = row.get("conversation")
    if turns is None:
        return None
    turns, tools = _decoded(turns), _decoded(row.get("tools"))
    if not isinstance(turns, list):
        raise BadSample(f"the conversation is a {type(turns).__name__}, not a list of messages")
    messages = [normalise(turn, number) for number, turn in enumerate(turns, 1)]
    system = row.get("system")
    if isinstance(system, str):
        check_text(system, "'system'")
    if isinstance(system, str) and system and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, {"role": "system", "content": system})
    if not messages:
        raise BadSample("no assistant text: the conversation is empty")
    if tools is not None and not isinstance(tools, list):
        raise BadSample(f"'tools' is a {type(tools).__name__}, not a list")
    _check_tree(tools, "'tools'")
    return messages, tools or None


def normalise(turn: Any, number: int) -> Message:
    """A message with `role` (user, assistant, system, developer, tool) and `content` (a string, maybe empty).

    The assistant's may also have `reasoning_content` (split off from `<think>` in the content; an empty pair
    stays there) and `tool_calls` (`[{"type": "function", "function": {"name", "arguments": dict or str}}]`).

    Raises:
        BadSample: neither `role`/`content` nor `from`/`value`, an unknown role, or content that is no text.
    """
    if not isinstance(turn, Mapping):
        raise BadSample(
            f"message {number} is a {type(turn).__name__}, not an object with 'role' and 'content'"
        )
    spoken = turn.get("role") or turn.get("from")
    if not isinstance(spoken, str):
        raise BadSample(
            f"message {number} has neither 'role' nor 'from' (found: {', '.join(turn) or 'nothing'})"
        )
    role = ROLES.get(spoken.lower())
    if role is None:
        raise BadSample(f"message {number} has the unknown role {spoken!r}")
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    text = _text(content, number)
    check_text(text, f"message {number}")
    message: Message = {"role": role, "content": text}
    message.update({name: turn[name] for name in KEPT if turn.get(name)})
    _check_tree([message.get(name) for name in KEPT], f"message {number}")
    if role != "assistant":
        return message
    calls = _decoded(turn.get("tool_calls"))
    if spoken.lower() == "function_call":
        call = _decoded(text)
        if isinstance(call, dict) and "name" in call:
            calls, message["content"] = [call], ""
    if calls:
        if not isinstance(calls, list):
            raise BadSample(f"message {number} has 'tool_calls' of type {type(calls).__name__}, not a list")
        message["tool_calls"] = [_tool_call(call, number) for call in calls]
        _check_tree(message["tool_calls"], f"message {number}")
    thoughts = next(
        (turn[name] for name in REASONING_FIELDS if isinstance(turn.get(name), str) and turn[name]), ""
    )
    if not thoughts and "</think>" in message["content"]:
        before, _, answer = message["content"].partition("</think>")
        if before.lstrip().startswith("<think>") or "<think>" not in before:
            thoughts = before.replace("<think>", "", 1).strip("\n")
            if thoughts.strip():
                message["content"] = answer.lstrip("\n")
            elif "<think>" not in before:  # the prompt had opened the thought
                message["content"] = f"<think>{message['content']}"
    if thoughts.strip():
        check_text(thoughts, f"message {number}")
        message["reasoning_content"] = thoughts
    return message


def _decoded(value: Any) -> Any:
    """The value, or what its JSON says when it is a string of JSON."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def check_text(text: str, where: str) -> None:
    """Refuse text that no tokenizer takes.

    A JSON escape such as `\\ud83d` alone is half of a character (a lone surrogate): what is left of an emoji
    that was cut in two. UTF-8 cannot write it.

    Raises:
        BadSample: naming the place.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise BadSample(
            f"{where} holds half of a character, {half} at character {error.start + 1} (a cut emoji?): UTF-8 "
            "has no such text"
        ) from None


def _check_tree(value: Any, where: str) -> None:
    """The same for everything inside tools and tool calls."""
    if value is None or value == [None] * len(KEPT):
        return
    try:
        written = json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:
        raise BadSample(f"{where}: nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise BadSample(f"{where}: no JSON: {error}") from None
    check_text(written, where)


def _text(content: Any, number: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):  # content parts
        parts = []
        for part in content:
            if isinstance(part, str):
                parts.append(part)
            elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
                parts.append(part["text"])
            else:
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise BadSample(f"message {number} holds {kind!r} content; only text can be trained on")
        return "".join(parts)
    raise BadSample(f"message {number} has content of type {type(content).__name__}, not text")


def _tool_call(call: Any, number: int) -> Message:
    call = _decoded(call)
    function = _decoded(call.get("function", call)) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadSample(f"message {number} has a tool call without a function name")
    arguments = _decoded(function.get("arguments", function.get("parameters")))
    shaped: Message = {
        "type": "function",
        "function": {"name": function["name"], "arguments": {} if arguments is None else arguments},
    }
    if isinstance(call.get("id"), str):
        shaped["id"] = call["id"]
    return shaped
