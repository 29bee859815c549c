from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken

from dflash.data.tokenizer import train_tokenizer

TEXTS = [
    "def add(a, b):\n    return a + b\n",
    "Wie schön, naïve café — 日本語!",
    "the quick brown fox jumps over the lazy dog " * 3,
]
LLAMA_TOKENS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


@pytest.fixture(scope="session")
def tokenizer():
    """A small byte-level tokenizer of our own, with Llama's special tokens besides."""
    made = train_tokenizer(TEXTS * 3, 600)
    made.add_special_tokens({"bos_token": "<|begin_of_text|>"})
    made.add_tokens([AddedToken(text, special=True, normalized=False) for text in LLAMA_TOKENS])
    return made


@pytest.fixture
def with_template(tokenizer):
    """The tokenizer with another chat template, for one test."""
    own = tokenizer.chat_template

    def change(template: str):
        tokenizer.chat_template = template
        return tokenizer

    yield change
    tokenizer.chat_template = own


@pytest.fixture
def jsonl(tmp_path: Path):
    """Write rows (objects, or raw lines) to a JSONL and give its path."""

    def write(*rows: object, name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    return write
