"""Our spans against the `{% generation %}` tags that the package `trl` puts into released models' templates.

Skipped where the package is not installed; only its data files are read (`pip install --no-deps trl`).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tokenizers import AddedToken

from dflash.data.template import ChatRenderer
from dflash.data.tokenizer import train_tokenizer

SPEC = importlib.util.find_spec("trl")
FOLDER = (
    Path(next(iter(SPEC.submodule_search_locations or [""]))) / "chat_templates" if SPEC else Path("nowhere")
)
STOPS = [
    "<|eot_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>",
    "<|return|>",
    "<|call|>",
]
NAMES = """
cohere cohere2 deepseek_r1_distill deepseekv3 gemma gemma3 gptoss lfm2 lfm2_v2 llama3 muse_glimmer nemotron_3_nano
nemotron_3_super phi3 phi3_5 qwen2_5 qwen2_5_vl qwen3 qwen3_5_nothink qwen3_5_think qwen3_6 qwen3_8 qwen3_instruct_2507
qwen3_vl
""".split()  # noqa: SIM905
CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "fox"}}}
QUESTION = {"role": "user", "content": "One?"}
CHATS = {
    "turns": [
        QUESTION,
        {"role": "assistant", "content": "First."},
        QUESTION,
        {"role": "assistant", "content": "Second."},
    ],
    "thoughts": [
        QUESTION,
        {"role": "assistant", "content": "First.", "reasoning_content": "one"},
        QUESTION,
        {"role": "assistant", "content": "Second.", "reasoning_content": "two"},
    ],
    "tools": [
        QUESTION,
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
        {"role": "tool", "name": "look_up", "content": "animal"},
        {"role": "assistant", "content": "An animal."},
    ],
}
NO_TOOLS = {"cohere", "cohere2", "gemma", "gemma3", "deepseek_r1_distill"}
"""They refuse a tool's turn."""


@pytest.fixture(scope="module")
def stops():
    tokenizer = train_tokenizer(["some text"], 300)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in STOPS])
    return tokenizer


@pytest.mark.skipif(not FOLDER.is_dir(), reason="needs the data files of trl")
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", NAMES)
def test_spans_end_with_the_tags_and_start_inside_them(stops, name, chat):
    """Their tags may take in the header that the prompt holds; where our span starts later, only that lies
    between."""
    if chat == "tools" and name in NO_TOOLS:
        pytest.skip("the model knows no tools")
    found = {}
    for kind in ("", "_training"):
        stops.chat_template = (FOLDER / f"{name}{kind}.jinja").read_text(encoding="utf-8")
        rendered = ChatRenderer(stops)(CHATS[chat])
        found[kind] = [rendered.text[start:end] for start, end in rendered.spans]
    tagged = [
        text for text in found["_training"] if text != "<|im_end|>"
    ]  # phi3 tags the final end of text by itself
    assert len(found[""]) == len(tagged)
    for ours, theirs in zip(found[""], tagged, strict=True):
        assert theirs.endswith(ours)
        assert theirs.removesuffix(ours).count(".") == 0  # no sentence of the answer is lost
