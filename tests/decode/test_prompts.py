"""Prompts as people have them."""

from __future__ import annotations

import json

import pytest

from dflash.data.tokenizer import train_tokenizer
from dflash.decode.prompts import read_prompts
from steptime.errors import UserError

CHAT = [{"role": "user", "content": "one and two"}, {"role": "assistant", "content": "three"}]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["one and two are three, three and two are five"] * 3, 300)


@pytest.fixture
def read(tokenizer, tmp_path):
    def reading(*rows, tokenizer=tokenizer, limit=None, context=0, max_new_tokens=8, **options):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sizes = {"limit": limit, "context": context, "max_new_tokens": max_new_tokens}
        return read_prompts(path, tokenizer, 300, **sizes, **options)

    return reading


def test_a_conversation_up_to_its_last_answer(read, tokenizer):
    (prompt,) = read({"conversations": CHAT})
    assert tokenizer.decode(prompt.ids) == "<|im_start|>user\none and two<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.origin.endswith("prompts.jsonl:1")


def test_all_spellings_give_the_same(read):
    sharegpt = [{"from": "human", "value": "one and two"}, {"from": "gpt", "value": "three"}]
    rows = [
        {"messages": CHAT},
        {"conversations": sharegpt},
        {"prompt": "one and two"},
        {"messages": CHAT[:1]},
    ]
    assert len({prompt.ids for prompt in read(*rows)}) == 1


def test_earlier_answers_stay(read, tokenizer):
    turns = [*CHAT, {"role": "user", "content": "and five"}, {"role": "assistant", "content": "two"}]
    (prompt,) = read({"messages": turns})
    text = tokenizer.decode(prompt.ids)
    assert "three" in text
    assert text.endswith("and five<|im_end|>\n<|im_start|>assistant\n")


def test_the_datas_own_answer_comes_along_as_training_renders_it(read, tokenizer):
    (prompt,) = read({"conversations": CHAT})
    said = [index for index, flag in zip(prompt.data_ids, prompt.data_mask, strict=True) if flag]
    assert tokenizer.decode(said) == "three<|im_end|>"
    assert prompt.data_ids[: len(prompt.ids)] == prompt.ids
    assert prompt.thinks is False
    (ready,) = read({"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]})
    assert (ready.data_ids, ready.data_mask) == ((5, 6, 7, 8), (False, False, True, True))
    (cut,) = read({"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}, longest=3)
    assert (cut.data_ids, cut.data_mask) == ((5, 6, 7), (False, False, True))
    (asked,) = read({"prompt": "one"})
    assert (asked.data_ids, asked.thinks) == ((), None)


def test_thinking_is_asked_of_the_template(read, tokenizer, monkeypatch):
    ask = "{%- if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", tokenizer.chat_template + ask)
    ends = [
        tokenizer.decode(read({"prompt": "one"}, thinking=mode)[0].ids).endswith("</think>\n\n")
        for mode in (None, True, False)
    ]
    assert ends == [False, False, True]
    thinking = {"role": "assistant", "content": "<think>hm</think>three"}
    assert read({"conversations": [CHAT[0], thinking]})[0].thinks is True


def test_ready_token_ids_need_no_tokenizer(read):
    (prompt,) = read({"input_ids": [4, 5, 6, 7, 8], "loss_mask": [0, 0, 0, 1, 1]}, tokenizer=None)
    assert prompt.ids == (4, 5, 6)


def test_only_the_first_so_many(read):
    assert len(read(*[{"prompt": f"{i}"} for i in range(5)], limit=2)) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "x", "answer": "y"},
            r"prompts.jsonl:1: no 'conversations', .* \(found: question, answer\)",
        ),
        ({"messages": [{"role": "assistant", "content": "hello"}]}, "prompts.jsonl:1: no prompt"),
        ({"input_ids": [1, 2], "loss_mask": [1, 1]}, "prompts.jsonl:1: no prompt: 'loss_mask' begins with 1"),
        ({"input_ids": [1, 999], "loss_mask": [0, 1]}, "token id 999 .* outside the vocabulary of 300"),
        ([1], "prompts.jsonl:1: not an object"),
        (
            {"prompt": "a\ud83d"},
            r"prompts.jsonl:1: message 1 holds half of a character, \\ud83d at",
        ),
    ],
)
def test_other_rows_are_refused_with_file_and_line(read, row, message):
    with pytest.raises(UserError, match=message):
        read(row)


def test_a_prompt_longer_than_the_context_is_refused_with_file_and_line(read):
    with pytest.raises(
        UserError,
        match=r"prompts.jsonl:2: the prompt has \d+ tokens, with 8 new ones \d+: longer than .* of 40",
    ):
        read({"prompt": "one"}, {"prompt": "one and two are three " * 20}, context=40)


def test_an_empty_file_is_refused(read):
    with pytest.raises(UserError, match="no prompts in it"):
        read()


def test_conversations_without_a_tokenizer(read):
    with pytest.raises(UserError, match="need a tokenizer"):
        read({"prompt": "x"}, tokenizer=None)
