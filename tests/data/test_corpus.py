from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from dflash.config import Config, load_config
from dflash.data import corpus
from dflash.data.conversations import load_tokenizer, open_data
from dflash.data.corpus import Function, ensure_stdlib, functions_of, read_library
from dflash.data.tokenizer import read_tokenizer, train_tokenizer
from steptime.errors import UserError
from tests.waiting import HANG_S

SOURCE = '''
import os

def short(): return 1

class Box:
    """A box."""

    @property
    def size(self) -> int:
        """The size.

        In units.
        """
        # never negative
        return abs(self._size)

    async def wait(self,
                   seconds: float = 1.0):  # patiently
        await self.clock(seconds)
        return self

if os.name == "nt":
    def where(path):
        a = path
        return a
else:
    def where(path):
        b = path
        return b
'''


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """A small part of the real library under a root of its own: enough functions, and one second instead of
    ten."""
    root = tmp_path_factory.mktemp("library")
    real = Path(sysconfig.get_paths()["stdlib"])
    for name in ("asyncio", "json", "unittest", "test/support"):
        if (real / name).is_dir():  # some systems package `test` apart
            shutil.copytree(
                real / name,
                root / name,
                ignore=shutil.ignore_patterns("__pycache__", "test_*", "*.txt", "data"),
            )
    (root / "broken.py").write_text("def (:\n")
    (root / "latin.py").write_bytes("# sch\xf6n\n".encode("latin-1"))
    return root


@pytest.fixture(scope="module")
def built(library, tmp_path_factory) -> Path:
    return ensure_stdlib(tmp_path_factory.mktemp("cache"), 1024, library)


def test_functions_of():
    found = {function.name: function for function in functions_of(SOURCE, "box")}
    assert list(found) == ["Box.size", "Box.wait", "where"]  # the second `where` has the same name
    size, wait = found["Box.size"], found["Box.wait"]
    assert size.signature == "def size(self) -> int:"
    assert size.docstring == "The size.\n\nIn units."
    assert size.source.startswith('@property\ndef size(self) -> int:\n    """The size.')
    assert size.source.endswith("    # never negative\n    return abs(self._size)")
    assert wait.signature == "async def wait(self,\n               seconds: float = 1.0):"
    assert wait.docstring == ""
    turns = size.conversation()["conversations"]
    assert (
        turns[0]["content"]
        == "Write `Box.size` of the Python module `box`.\n\ndef size(self) -> int:\n\nThe size.\n\nIn units."
    )
    assert turns[1]["content"] == f"```python\n{size.source}\n```"


@pytest.mark.slow
def test_library_once_and_in_an_order_of_names_only(library):
    functions = read_library(library)
    assert len({function.source for function in functions}) == len(functions)
    assert len({(function.module, function.name) for function in functions}) == len(functions)
    assert [function.key for function in functions] == sorted(function.key for function in functions)
    assert {function.module.split(".")[0] for function in functions} == {"asyncio", "json", "unittest"}
    for function in functions[:50]:
        compile(function.source, function.name, "exec")


def test_built_folder(built):
    assert sorted(path.name for path in built.iterdir()) == [
        "heldout.jsonl",
        "meta.json",
        "tokenizer",
        "train.jsonl",
    ]
    splits = {}
    for split in ("train", "heldout"):
        rows = [json.loads(line) for line in (built / f"{split}.jsonl").read_text().splitlines()]
        splits[split] = {row["id"] for row in rows}
        for row in rows:
            module, name = row["id"].split(":")
            assert Function(module, name, "", "", "").held_out is (split == "heldout")
    assert not splits["train"] & splits["heldout"]
    assert 0.01 < len(splits["heldout"]) / len(splits["train"]) < 0.1


@pytest.mark.slow
def test_built_again_is_equal_byte_for_byte(built, library, tmp_path):
    """In another process too: nothing depends on a hash seed."""
    code = "import sys; from pathlib import Path; from dflash.data.corpus import ensure_stdlib; "
    code += "print(ensure_stdlib(sys.argv[1], 1024, Path(sys.argv[2])))"
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path, library],
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_S,
    )
    other = Path(done.stdout.strip())
    assert other.name == built.name
    files = [path.relative_to(built) for path in built.rglob("*") if path.is_file()]
    assert len(files) >= 5
    assert all((built / name).read_bytes() == (other / name).read_bytes() for name in files)


@pytest.mark.slow
def test_present_folder_is_taken_and_a_damaged_one_built_again(built, library, monkeypatch):
    monkeypatch.setattr(corpus, "read_library", None)  # would raise
    assert ensure_stdlib(built.parent, 1024, library) == built
    monkeypatch.undo()
    (built / "train.jsonl").unlink()
    assert ensure_stdlib(built.parent, 1024, library) == built
    assert (built / "train.jsonl").stat().st_size > 10_000


def test_fault_while_building_leaves_nothing(library, tmp_path, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(corpus, "train_tokenizer", fail)
    with pytest.raises(ZeroDivisionError):
        ensure_stdlib(tmp_path, 1024, library)
    assert not list(tmp_path.iterdir())


def test_no_source(tmp_path):
    with pytest.raises(UserError, match="holds the source of only 0 functions"):
        read_library(tmp_path)


def test_cache_that_cannot_be_written(library, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        ensure_stdlib(tmp_path / "file" / "cache", 1024, library)


# -- tokenizer -----------------------------------------------------------------------------------------------


def test_special_tokens(built):
    tokenizer = read_tokenizer(built / "tokenizer")
    assert tokenizer.is_fast
    assert len(tokenizer) <= 1024
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.mask_token) == (
        "<|im_end|>",
        "<|endoftext|>",
        "<|MASK|>",
    )
    assert len({tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id}) == 3
    for text in ("<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>"):
        assert len(tokenizer.encode(text, add_special_tokens=False)) == 1
    kept = tokenizer.decode(tokenizer.encode("<think>a</think>b<|im_end|>"), skip_special_tokens=True)
    assert kept == "<think>a</think>b"


def test_any_text_comes_back(built):
    tokenizer = read_tokenizer(built / "tokenizer")
    for text in (
        "def f(x):\n\treturn  x\n\n\n",
        "naïve — 日本語 🙂",
        "\x00\x7f e\u0301",
        "Don't  strip ' this",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_corpus_is_compressed(built):
    """Some two and a half bytes for each token, or the vocabulary was not trained on it."""
    tokenizer = read_tokenizer(built / "tokenizer")
    text = (built / "heldout.jsonl").read_text()
    assert len(text) / len(tokenizer.encode(text)) > 2.0


def test_vocabulary_too_small():
    with pytest.raises(UserError, match="at least 266"):
        train_tokenizer(["text"], 200)


def test_missing_tokenizer(tmp_path):
    with pytest.raises(
        UserError, match=r"^data.tokenizer = '.*nowhere': no tokenizer could be loaded"
    ) as caught:
        read_tokenizer(tmp_path / "nowhere")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"^target.model = "):
        load_tokenizer(load_config(None, [f"target.model={tmp_path}"]))


def test_open_data_of_the_built_in_corpus(built, monkeypatch):
    config = load_config(None, [f"data.cache={built.parent}", "target.tiny.vocab_size=1024"])
    monkeypatch.setattr(corpus, "read_library", lambda root=None: pytest.fail("must come from the cache"))
    train, heldout = open_data(config, limit=20), open_data(config, "heldout")
    assert len(train.samples) == 20
    assert train.samples[0].origin.startswith(str(built / "train.jsonl"))
    assert len(heldout.samples) > 5
    text = train.tokenizer.decode(train.samples[0].input_ids[train.samples[0].loss_mask])
    assert text.startswith("```python\n")
    assert isinstance(config, Config)
