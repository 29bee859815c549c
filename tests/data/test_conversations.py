from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import templates as T
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config import DataConfig
from dflash.data import conversations, token_cache
from dflash.data.conversations import load_samples
from dflash.data.encode import Encoder, token_bytes, token_mask
from dflash.data.messages import conversation_of
from dflash.data.template import BadSample, Rendered
from steptime.errors import UserError

CHAT = {
    "conversations": [
        {"role": "user", "content": "Hi?"},
        {"role": "assistant", "content": "the quick brown fox"},
    ]
}


@pytest.fixture
def load(tokenizer, tmp_path):
    def run(path: Path, limit=None, vocab_size=None, **settings):
        settings = {"max_length": 64, "buckets": (64,), "cache": str(tmp_path / "cache"), **settings}
        return load_samples(DataConfig(path=str(path), **settings), tokenizer, limit, vocab_size)

    return run


def texts(dataset):
    return [dataset.tokenizer.decode(sample.input_ids[sample.loss_mask]) for sample in dataset.samples]


# -- spellings -----------------------------------------------------------------------------------------------

SPELLINGS = [
    CHAT,
    {"messages": CHAT["conversations"]},
    {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "the quick brown fox"}]},
    {"messages": json.dumps(CHAT["conversations"])},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi?"}]},
            {"role": "model", "content": "the quick brown fox"},
        ]
    },
]


def test_spellings_give_the_same_samples(load, jsonl):
    dataset = load(jsonl(*SPELLINGS))
    assert texts(dataset) == ["the quick brown fox<|im_end|>"] * len(SPELLINGS)
    assert len({sample.input_ids.tobytes() for sample in dataset.samples}) == 1
    assert [sample.origin.rpartition(":")[2] for sample in dataset.samples] == ["1", "2", "3", "4", "5"]
    assert dataset.samples[0].input_ids.dtype == np.int32
    assert dataset.samples[0].loss_mask.dtype == bool


@pytest.mark.slow
def test_json_array_parquet_and_folder(load, jsonl, tmp_path):
    import datasets

    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps(SPELLINGS[:2]), encoding="utf-8")
    datasets.Dataset.from_list([CHAT] * 3).to_parquet(str(folder / "b.parquet"))
    tools = {
        "messages": [
            *CHAT["conversations"],
            {"role": "tool", "content": "x"},
            {"role": "assistant", "content": "y", "name": "n"},
        ]
    }
    datasets.Dataset.from_list([tools, SPELLINGS[1]]).to_parquet(
        str(folder / "c.parquet")
    )  # keys filled up with None
    dataset = load(folder)
    assert texts(dataset)[:5] == ["the quick brown fox<|im_end|>"] * 5
    assert len(dataset.samples) == 7
    assert dataset.samples[4].origin == f"{folder / 'b.parquet'}:3"


def test_sharegpt_tools_system_and_function_calls():
    row = {
        "system": "Be brief.",
        "tools": json.dumps([{"name": "f"}]),
        "conversations": [
            {"from": "human", "value": "fox?"},
            {"from": "function_call", "value": json.dumps({"name": "f", "arguments": {"word": "fox"}})},
            {"from": "observation", "value": "animal"},
            {"from": "gpt", "value": "<think>\nhm\n</think>\n\nAn animal."},
        ],
    }
    found = conversation_of(row)
    assert found is not None
    messages, tools = found
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert messages[2]["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": {"word": "fox"}}}
    ]
    assert (messages[4]["reasoning_content"], messages[4]["content"]) == ("hm", "An animal.")
    assert tools == [{"name": "f"}]
    openai = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    }
    messages, _ = conversation_of({"messages": [openai]}) or ([], None)
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def test_reasoning_kept_or_masked(load, jsonl, with_template):
    row = {
        "messages": [
            CHAT["conversations"][0],
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nthe fox"},
        ]
    }
    path = jsonl(row)
    assert texts(load(path)) == ["<think>\nhm\n</think>\n\nthe fox<|im_end|>"]
    assert texts(load(path, reasoning="mask")) == ["the fox<|im_end|>"]
    with_template(T.CHATML)  # knows no reasoning_content: the thoughts go into the content
    assert texts(load(path)) == ["<think>\nhm\n</think>\n\nthe fox<|im_end|>"]
    assert texts(load(path, reasoning="mask")) == ["the fox<|im_end|>"]


EMPTY = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("written", [EMPTY, "<think></think>", "\n</think>\n\n"])
@pytest.mark.parametrize(
    ("template", "kept"),
    [
        (None, "own"),  # knows thoughts and would write none: the pair as it is in the content
        (T.CHATML, "own"),  # knows no thoughts
        (T.QWEN3, "template"),  # writes the pair by itself
        (T.QWEN35, "opened"),  # and had its prompt open it
        (T.CHATML.replace("m.content", "m.content.split('</think>')[-1].lstrip()"), "no"),
    ],
)
def test_an_empty_thought_is_what_the_target_wrote(load, jsonl, with_template, template, kept, written):
    path = jsonl(
        {"messages": [CHAT["conversations"][0], {"role": "assistant", "content": f"{written}the fox"}]}
    )
    if template is not None:
        with_template(template)
    own = f"<think>{written}" if not written.startswith("<think>") else written
    expected = {"own": own, "template": EMPTY, "opened": "\n</think>\n\n", "no": ""}[kept]
    assert texts(load(path)) == [f"{expected}the fox<|im_end|>"]
    assert texts(load(path, reasoning="mask")) == ["the fox<|im_end|>"]


def test_an_empty_thought_of_an_earlier_turn_goes_where_other_thoughts_go(load, jsonl, with_template):
    turn = [CHAT["conversations"][0], {"role": "assistant", "content": f"{EMPTY}the fox"}]
    path = jsonl({"messages": turn * 2})
    answers = "the fox<|im_end|>", f"{EMPTY}the fox<|im_end|>"
    assert texts(load(path)) == ["".join(answers)]  # this template drops old thoughts
    with_template(T.CHATML)
    assert texts(load(path)) == [answers[1] * 2]


def test_an_empty_thought_alone_is_no_answer(load, jsonl):
    turns = [CHAT["conversations"][0], {"role": "assistant", "content": EMPTY}]
    with pytest.raises(UserError, match="no assistant text"):
        load(jsonl({"messages": turns}))


def test_last_turn_only(load, jsonl):
    row = {
        "messages": [
            *CHAT["conversations"],
            {"role": "user", "content": "More?"},
            {"role": "assistant", "content": "no more"},
        ]
    }
    assert texts(load(jsonl(row), turns="last")) == ["no more<|im_end|>"]


def test_answer_that_was_cut_has_no_end_in_the_loss(load, jsonl):
    assert texts(load(jsonl({**CHAT, "finished": False}))) == ["the quick brown fox"]


def test_token_ids(load, jsonl):
    dataset = load(
        jsonl(
            {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 0]},
            CHAT,
            {"input_ids": [9, 9], "loss_mask": [True, True]},
        )
    )
    assert dataset.samples[0].input_ids.tolist() == [5, 6, 7, 8]
    assert dataset.samples[0].loss_mask.tolist() == [False, True, True, False]
    assert dataset.samples[2].input_ids.tolist() == [9, 9]  # the order of the file


# -- cutting and dropping ------------------------------------------------------------------------------------


def test_cut_keeps_a_pair_or_drops_and_counts(load, jsonl):
    ids = list(range(80))
    whole = {"input_ids": ids, "loss_mask": [1] * 80}
    at_edge = {"input_ids": ids, "loss_mask": [0] * 62 + [1] * 18}  # positions 62 and 63 stay: one pair
    too_late = {"input_ids": ids, "loss_mask": [0] * 63 + [1] * 17}  # only position 63 stays
    scattered = {"input_ids": [1, 2, 3, 4], "loss_mask": [1, 0, 1, 0]}
    path = jsonl(whole, at_edge, too_late, scattered)
    dataset = load(path)
    assert [len(sample.input_ids) for sample in dataset.samples] == [64, 64]
    assert (dataset.tally.cut, dataset.tally.dropped) == (2, 2)
    reason = "no two supervised tokens in a row within the first 64"
    assert dataset.skipped == [(f"{path}:3", reason), (f"{path}:4", reason)]
    assert "2 dropped" in dataset.summary()
    assert "2 cut" in dataset.summary()


def test_limit(load, jsonl):
    assert len(load(jsonl(*[CHAT] * 5), limit=3).samples) == 3


# -- bad input -----------------------------------------------------------------------------------------------

BAD = [
    ('{"messages": [', r"not valid JSON: expecting value at column \d+"),
    ("[1, 2]", "a list where an object is expected"),
    ({"messages": CHAT["conversations"][:1]}, "no assistant text"),
    ({"messages": []}, "no assistant text: the conversation is empty"),
    (
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "  "}]},
        "no assistant text",
    ),
    ({"messages": "hello"}, "the conversation is a str, not a list of messages"),
    ({"messages": ["hello"]}, "message 1 is a str, not an object with 'role' and 'content'"),
    (
        {"messages": [{"speaker": "me", "content": "x"}]},
        r"message 1 has neither 'role' nor 'from' \(found: speaker, content\)",
    ),
    ({"messages": [{"role": "judge", "content": "x"}]}, "message 1 has the unknown role 'judge'"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "message 1 holds 'image_url' content; only text",
    ),
    ({"messages": [{"role": "user", "content": 5}]}, "message 1 has content of type int, not text"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        "message 1 has a tool call without a function name",
    ),
    (
        r'{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so \ud83d!"}]}',
        r"message 2 holds half of a character, \\ud83d at character 4 \(a cut emoji\?\)",
    ),
    (r'{"messages": [{"role": "user", "content": ["\udc00"]}]}', r"message 1 holds half of a character"),
    (r'{"messages": "[{\"role\": \"user\", \"content\": \"\\ud83d\"}]"}', "message 1 holds half of"),
    (r'{"messages": [], "system": "\ud83d"}', "'system' holds half of a character"),
    (
        r'{"messages": [{"role": "user", "content": "x"}], "tools": [{"d": "\ud83d"}]}',
        "'tools' holds half of a character",
    ),
    (
        r'{"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"\ud83d": 1}}]}]}',
        "message 1 holds half of a character",
    ),
    (r'{"messages": [{"role": "\ud83d", "content": "x"}]}', r"message 1 has the unknown role '\\ud83d'"),
    (r'{"\ud83d": 1}', r"no 'conversations', 'messages' or 'input_ids' \(found: \\ud83d\)"),
    ("[" * 100_000, "not valid JSON: nested too deeply"),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": 5}]},
        "message 1 has 'tool_calls' of type int",
    ),
    ({"input_ids": [1, 2]}, r"'input_ids' without 'loss_mask' \(found: input_ids\)"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, "'input_ids' has 2 entries, 'loss_mask' 1"),
    ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "no assistant text: 'loss_mask' is all 0"),
    ({"input_ids": [1, 2], "loss_mask": [2, 1]}, "'loss_mask' may hold only 0 and 1"),
    ({"input_ids": [1.5, 2], "loss_mask": [1, 1]}, "'input_ids' must be a flat list of integers"),
    ({"input_ids": [[1], [2, 3]], "loss_mask": [1, 1]}, "'input_ids' and 'loss_mask' must be flat lists"),
    (
        {"input_ids": [1, 999999], "loss_mask": [1, 1]},
        r"token id 999999 at position 1 is outside the vocabulary of \d+",
    ),
    ({"input_ids": [-1, 2], "loss_mask": [1, 1]}, "token id -1 at position 0 is outside the vocabulary"),
    (
        {"question": "a", "answer": "b", "n": 1},
        r"no 'conversations', 'messages' or 'input_ids' \(found: question, answer, n\); convert with "
        r"`dflash prepare --from .*data.jsonl --user question --assistant answer --out FILE`",
    ),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_bad_line_is_one_clear_line(load, jsonl, row, message):
    path = jsonl(CHAT, "", row)
    with pytest.raises(UserError, match=rf"^{path}:3: {message}") as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_skip_bad_counts_and_lists(load, jsonl):
    rows = [row for row, _ in BAD]
    path = jsonl(CHAT, *rows, CHAT)
    dataset = load(path, skip_bad=True)
    assert len(dataset.samples) == 2
    assert [origin for origin, _ in dataset.skipped] == [f"{path}:{line}" for line in range(2, len(rows) + 2)]
    assert f"{len(rows)} bad lines skipped" in dataset.summary()


def test_broken_encoding(load, tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(json.dumps(CHAT).encode() + b"\n" + '{"messages": "schön"}'.encode("latin-1") + b"\n")
    with pytest.raises(UserError, match=r"latin.jsonl:2: not valid UTF-8 \(byte 18\)"):
        load(path)


@pytest.mark.slow
def test_text_that_parquet_cannot_decode_is_one_bad_row(load, tmp_path):
    """The first row of a batch that is no UTF-8 does not take the others with it."""
    import pyarrow
    from pyarrow import parquet

    texts = [json.dumps(CHAT["conversations"]).encode(), b'["\xed\xa0\xbd"]', b"\xff"]
    column = pyarrow.array([*texts, texts[0]], pyarrow.binary()).view(pyarrow.string())
    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.table({"messages": column}), path)
    dataset = load(path, skip_bad=True)
    assert [sample.origin for sample in dataset.samples] == [f"{path}:1", f"{path}:4"]
    assert [reason for _, reason in dataset.skipped] == [
        "not valid UTF-8 (byte 3)",
        "not valid UTF-8 (byte 1)",
    ]


def test_a_byte_order_mark_before_an_array(load, tmp_path):
    path = tmp_path / "data.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps([CHAT], indent=1).encode())
    assert len(load(path).samples) == 1


def test_missing_empty_and_unreadable_files(load, jsonl, tmp_path):
    with pytest.raises(UserError, match=r"nowhere.jsonl: no such file; data.path takes"):
        load(tmp_path / "nowhere.jsonl")
    with pytest.raises(UserError, match=r"data.jsonl: the data set is empty$"):
        load(jsonl())
    with pytest.raises(
        UserError, match=r"the data set is empty \(1 left out, the first: .*:1: no assistant text"
    ):
        load(jsonl({"messages": []}), skip_bad=True)
    with pytest.raises(
        UserError, match=r"the data set is empty \(1 left out, the first: .*no two supervised"
    ):
        load(jsonl({"input_ids": [1, 2], "loss_mask": [1, 0]}))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no .jsonl, .json, .parquet file in this folder"):
        load(tmp_path / "empty")
    (tmp_path / "bad.json").write_text("[{", encoding="utf-8")
    with pytest.raises(UserError, match=r"bad.json: not valid JSON"):
        load(tmp_path / "bad.json")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(UserError, match=r"bad.parquet: not a readable Parquet file"):
        load(tmp_path / "bad.parquet")


def test_vocabulary_of_the_target_counts(load, jsonl):
    with pytest.raises(UserError, match=r":1: token id \d+ at position 0 is outside the vocabulary of 100"):
        load(jsonl(CHAT), vocab_size=100)


def test_token_ids_need_no_tokenizer(jsonl, tmp_path):
    config = DataConfig(path=str(jsonl({"input_ids": [1, 2], "loss_mask": [1, 1]})), cache=str(tmp_path))
    assert len(load_samples(config, None, vocab_size=10).samples) == 1
    chat = DataConfig(path=str(jsonl(CHAT)), cache=str(tmp_path))
    with pytest.raises(UserError, match="conversations need a tokenizer"):
        load_samples(chat, None)


# -- masks by token ------------------------------------------------------------------------------------------


def test_token_that_begins_in_the_prompt_is_not_supervised():
    assert token_mask(np.array([0, 2, 5, 9, 9]), [(3, 9)]).tolist() == [False, False, True, False, False]
    assert token_mask(np.array([0, 2, 5, 9, 9]), [(0, 1), (5, 20)]).tolist() == [
        True,
        False,
        True,
        True,
        True,
    ]


PIECES = ["def ", "return", "schön", "日本", "\n\n", "  ", "<|im_end|>", "é", "e\u0301", "🙂", "x"]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=12), st.data())
def test_masks_by_bytes_and_by_offsets_agree(tokenizer, pieces, data):
    text = "".join(pieces)
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start + 1, len(text)))
    item = Rendered(text, ((start, end),))
    fast, slow = Encoder(tokenizer), Encoder(tokenizer)
    assert fast._bytes is not None
    slow._bytes = None
    (ids, mask), (slow_ids, slow_mask) = fast([item])[0], slow([item])[0]
    assert ids.tolist() == slow_ids.tolist()
    # Offsets know only whole characters: a token that starts inside one counts there with its character.
    starts = np.cumsum(np.append(0, fast._bytes[ids]))[:-1]
    edges = {len(text[:place].encode()) for place in range(len(text) + 1)}
    whole = np.array([int(place) in edges for place in starts])
    assert mask[whole].tolist() == slow_mask[whole].tolist()


def test_tokenizers_that_are_not_byte_level_use_offsets(tokenizer):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    assert token_bytes(words) is None
    changed = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    changed.normalizer = normalizers.Lowercase()
    assert token_bytes(changed) is None


# -- the cache -----------------------------------------------------------------------------------------------


@pytest.fixture
def cached(monkeypatch):
    monkeypatch.setattr(conversations, "CACHED_FROM_S", 0.0)


def test_second_time_comes_from_the_cache(load, jsonl, cached, monkeypatch):
    path = jsonl(*[CHAT] * 5, {"input_ids": [1, 2], "loss_mask": [1, 0]})
    first = load(path)
    monkeypatch.setattr(conversations, "_tokenise", None)  # would raise
    again = load(path)
    assert [sample.input_ids.tolist() for sample in again.samples] == [
        sample.input_ids.tolist() for sample in first.samples
    ]
    assert [sample.loss_mask.tolist() for sample in again.samples] == [
        sample.loss_mask.tolist() for sample in first.samples
    ]
    assert [sample.origin for sample in again.samples] == [sample.origin for sample in first.samples]
    assert again.tally == first.tally
    assert len(load(path, limit=2).samples) == 2


def test_cache_is_not_used_for_anything_else(load, jsonl, cached, with_template):
    path = jsonl(CHAT)
    shorter = len(load(path).samples[0].input_ids) - 4
    assert texts(load(path, max_length=shorter, buckets=(shorter,))) != texts(load(path))
    with_template(T.CHATML_TAGGED.replace("assistant\\n'", "bot\\n'"))
    assert texts(load(path)) == ["the quick brown fox<|im_end|>"]
    jsonl({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "other words"}]})
    assert texts(load(path)) == ["other words<|im_end|>"]


def test_damaged_cache_is_built_again(load, jsonl, cached, tmp_path):
    path = jsonl(*[CHAT] * 3)
    load(path)
    (folder,) = (tmp_path / "cache").glob("tokens-*")
    (folder / "input_ids.npy").write_bytes(b"")
    assert texts(load(path)) == ["the quick brown fox<|im_end|>"] * 3


def test_one_flipped_byte_in_the_cache_is_found(load, jsonl, cached, tmp_path):
    path = jsonl(*[CHAT] * 3)
    load(path)
    (folder,) = (tmp_path / "cache").glob("tokens-*")
    for name in token_cache.ARRAYS:
        raw = bytearray((folder / f"{name}.npy").read_bytes())
        raw[-1] ^= 1
        (folder / f"{name}.npy").write_bytes(raw)
        assert texts(load(path)) == ["the quick brown fox<|im_end|>"] * 3


def test_a_file_that_keeps_its_size_and_its_time_is_read_again(load, jsonl, cached):
    path = jsonl(CHAT)
    load(path)
    before = path.stat()
    path.write_text(path.read_text().replace("fox", "cat"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert texts(load(path)) == ["the quick brown cat<|im_end|>"]


def test_limited_reading_leaves_no_cache(load, jsonl, cached, tmp_path):
    load(jsonl(*[CHAT] * 5), limit=2)
    assert not list((tmp_path / "cache").glob("tokens-*"))


def test_cache_that_cannot_be_written_is_no_error(load, jsonl, cached, monkeypatch):
    def refuse(_):
        raise UserError("read-only")

    monkeypatch.setattr(token_cache, "atomic_folder", refuse)
    assert len(load(jsonl(CHAT)).samples) == 1


def test_a_message_that_is_no_object():
    with pytest.raises(BadSample, match="message 2 is a list"):
        conversation_of({"messages": [CHAT["conversations"][0], []]})
