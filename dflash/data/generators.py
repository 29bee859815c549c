"""Who answers when data is regenerated: the target in this process, or a server with OpenAI's interface."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from dflash.data.regenerate import Answer, Prompt
from dflash.data.template import BadSample, ChatRenderer
from dflash.data.thoughts import Thoughts
from steptime.errors import UserError

RETRIES = 4
RETRY_FIRST_S = 0.5
RETRY_STATUS = {408, 409, 429, 500, 502, 503, 504}


class TargetGenerator:
    """Batched generation with a transformers model.

    Prompts of like length share a batch and are padded on the left with the attention mask that says so;
    hybrid models take padding out of their recurrent state by that mask, so an answer does not depend on its
    batch (up to rounding).

    Args:
        model: a transformers causal language model.
        tokenizer: its tokenizer, with a chat template.
        stop_ids: ids that end a turn.
        max_new_tokens: most tokens of an answer.
        temperature: 0 is greedy.
        batch: prompts at a time.
        thinking: passed to the template as `enable_thinking` unless None.
        context: most tokens of prompt and answer; 0 for no limit.
        seed: of the sampling.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        stop_ids: Sequence[int],
        max_new_tokens: int,
        temperature: float = 0.0,
        batch: int = 16,
        thinking: bool | None = None,
        context: int = 0,
        seed: int = 0,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._renderer = ChatRenderer(tokenizer)
        self._thoughts = Thoughts(self._renderer)
        self._stop_ids = sorted({int(index) for index in stop_ids})
        self._max_new_tokens = max_new_tokens
        self._temperature = temperature
        self._variables = {} if thinking is None else {"enable_thinking": thinking}
        self._context = context
        self._seed = seed
        self.batch = batch

    def __call__(self, prompts: Sequence[Prompt], done: Callable[[int, Answer], None]) -> None:
        tokens = [self.prompt_ids(prompt) for prompt in prompts]
        order = []
        for place in sorted(range(len(prompts)), key=lambda place: (-len(tokens[place]), place)):
            if self._context and len(tokens[place]) >= self._context:
                done(place, Answer("", False))
            else:
                order.append(place)
        for start in range(0, len(order), self.batch):
            places = order[start : start + self.batch]
            for place, answer in zip(places, self.answers([tokens[place] for place in places]), strict=True):
                done(place, answer)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """The ids that the model answers to: the rendered history with the generation prompt.

        Raises:
            UserError: the template refuses it.
        """
        try:
            text = self._renderer.render(
                self._thoughts(prompt.messages, prompt.tools),
                prompt.tools,
                add_generation_prompt=True,
                **self._variables,
            )
        except BadSample as error:
            raise UserError(f"{prompt.origin}: {error}") from None
        return self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    def answers(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        """Generate for a batch of prompts."""
        import torch
        from transformers import GenerationConfig

        longest = max(map(len, prompts))
        device = self._model.device
        pad = self._stop_ids[0]
        ids = torch.tensor(
            [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device
        )
        mask = torch.tensor(
            [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device
        )
        room = self._context - longest if self._context else self._max_new_tokens
        settings: dict[str, Any] = {"do_sample": False}
        if self._temperature > 0:
            settings = {"do_sample": True, "temperature": self._temperature, "top_k": 0, "top_p": 1.0}
            torch.manual_seed(self._seed + sum(map(len, prompts)))
        config = GenerationConfig(
            max_new_tokens=min(self._max_new_tokens, room),
            eos_token_id=self._stop_ids,
            pad_token_id=pad,
            **settings,
        )
        with torch.inference_mode():
            output = self._model.generate(ids, attention_mask=mask, generation_config=config)
        rows = output[:, longest:].tolist()
        return [self._answer(prompt, row) for prompt, row in zip(prompts, rows, strict=True)]

    def _answer(self, prompt: Sequence[int], row: list[int]) -> Answer:
        stops = set(self._stop_ids)
        end = next((place for place, index in enumerate(row) if index in stops), None)
        words = row if end is None else row[:end]
        written = row if end is None else row[: end + 1]
        backend = self._tokenizer.backend_tokenizer
        text = backend.decode(words, skip_special_tokens=False)
        exact = backend.encode(text, add_special_tokens=False).ids == words
        opened = (
            self._tokenizer.decode(list(prompt[-8:])).rstrip().endswith("<think>")
        )  # the prompt began the thought
        return Answer(
            f"<think>\n{text}" if opened else text, end is not None, tuple(prompt), tuple(written), exact
        )


class Endpoint:
    """A server with OpenAI's chat interface. Safe for several threads.

    Args:
        url: e.g. `http://host:8000/v1`; `/v1` may be left out.
        model: its name there; empty takes the first one that the server lists.
        key: bearer token; None takes `OPENAI_API_KEY` when it is set.

    Raises:
        UserError: nobody answers at `url`.
    """

    def __init__(
        self,
        url: str,
        model: str,
        max_new_tokens: int,
        temperature: float = 0.0,
        thinking: bool | None = None,
        key: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        base = url.rstrip("/").removesuffix("/chat/completions")
        if not base.startswith(("http://", "https://")):
            raise UserError(f"--endpoint {url}: must begin with http:// or https://")
        self._base = base if base.endswith("/v1") else f"{base}/v1"
        self._key = os.environ.get("OPENAI_API_KEY", "") if key is None else key
        self._timeout_s = timeout_s
        self._body: dict[str, Any] = {"max_tokens": max_new_tokens, "temperature": temperature}
        if thinking is not None:
            self._body["chat_template_kwargs"] = {"enable_thinking": thinking}
        self.model = model or self._first_model()

    def _first_model(self) -> str:
        try:
            return str(self._call("/models", None)["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise UserError(f"{self._base}/models: lists no model; name one with --endpoint-model") from None

    def __call__(self, prompt: Prompt) -> Answer:
        body: dict[str, Any] = {
            **self._body,
            "model": self.model,
            "messages": [_spoken(message) for message in prompt.messages],
        }
        if prompt.tools:
            body["tools"] = list(prompt.tools)
        reply = self._call("/chat/completions", body)
        try:
            choice = reply["choices"][0]
            message = choice["message"]
            text = message.get("content") or ""
        except (KeyError, IndexError, TypeError, AttributeError):
            raise UserError(f"{self._base}: the reply holds no answer: {json.dumps(reply)[:200]}") from None
        thought = message.get("reasoning_content") or message.get("reasoning")
        if thought:
            text = (
                f"<think>\n{thought.strip()}\n</think>\n\n{text}" if text.strip() else f"<think>\n{thought}"
            )
        return Answer(text, choice.get("finish_reason") != "length")

    def _call(self, path: str, body: dict[str, Any] | None) -> Any:
        url = self._base + path
        headers = {
            "Content-Type": "application/json",
            **({"Authorization": f"Bearer {self._key}"} if self._key else {}),
        }
        data = None if body is None else json.dumps(body).encode()
        problem = ""
        for attempt in range(RETRIES):
            if attempt:
                time.sleep(RETRY_FIRST_S * 4 ** (attempt - 1))
            try:
                with urllib.request.urlopen(
                    urllib.request.Request(url, data, headers), timeout=self._timeout_s
                ) as reply:
                    return json.load(reply)
            except urllib.error.HTTPError as error:
                problem = f"{error.code} {error.reason}: {error.read(300).decode(errors='replace').strip()}"
                if error.code not in RETRY_STATUS:
                    break
            except ValueError:
                problem = "the reply is not JSON"
                break
            except OSError as error:  # refused, reset, timed out
                problem = str(getattr(error, "reason", error))
        raise UserError(
            f"{url}: {' '.join(problem.split())}; what is finished is kept, the same command goes on from "
            "there"
        )


def _spoken(message: dict[str, Any]) -> dict[str, Any]:
    """A message as the interface wants it: arguments of tool calls as strings."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = []
    for place, call in enumerate(calls):
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        written.append({"id": f"call_{place}", **call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": written}
