from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from dflash.commands import prepare as command
from dflash.data.prepare import Fields, convert, list_skipped
from steptime.errors import UserError

FIELDS = Fields(("question",), "answer")


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(*arguments: object) -> int:
    """The command as `dflash prepare` calls it; user errors come as exceptions, as the command line maps
    them."""
    app = typer.Typer()
    command.register(app)
    app.command("other")(lambda: None)
    return typer.main.get_command(app).main(["prepare", *map(str, arguments)], standalone_mode=False)


def test_convert(jsonl, tmp_path):
    path = jsonl(
        {"question": "a?", "answer": "b", "rule": "be kind"}, {"question": "ü?", "answer": 42, "rule": None}
    )
    result = convert(path, Fields(("question",), "answer", "rule"), tmp_path / "out.jsonl")
    assert result.written == 2
    assert rows_of(result.out) == [
        {
            "conversations": [
                {"role": "system", "content": "be kind"},
                {"role": "user", "content": "a?"},
                {"role": "assistant", "content": "b"},
            ]
        },
        {"conversations": [{"role": "user", "content": "ü?"}, {"role": "assistant", "content": "42"}]},
    ]


def test_convert_joins_several_questions_and_reads_parquet(tmp_path):
    import datasets

    path = tmp_path / "in.parquet"
    datasets.Dataset.from_list(
        [{"i": "Add.", "x": "1 2", "o": "3"}, {"i": "Say.", "x": "", "o": "hi"}]
    ).to_parquet(str(path))
    result = convert(path, Fields(("i", "x"), "o"), tmp_path / "out.jsonl", cache=tmp_path)
    assert [row["conversations"][0]["content"] for row in rows_of(result.out)] == ["Add.\n\n1 2", "Say."]


BAD = [
    (
        {"question": "a", "anser": "b"},
        r"no field 'answer' \(found: question, anser\); did you mean 'anser'\?",
    ),
    ({"question": "a", "answer": ""}, "no assistant text: 'answer' is empty"),
    ({"question": " ", "answer": "b"}, "no question: 'question' empty"),
    ({"question": "a", "answer": ["b"]}, "field 'answer' holds a list, not text"),
    (r'{"question": "a\ud83d", "answer": "b"}', r"field 'question' holds half of a character, \\ud83d"),
    ("{", "not valid JSON"),
    ("3", "a int where an object is expected"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_bad_row_leaves_no_output(jsonl, tmp_path, row, message):
    path = jsonl({"question": "a", "answer": "b"}, row)
    with pytest.raises(UserError, match=rf"^{path}:2: {message}"):
        convert(path, FIELDS, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
    result = convert(path, FIELDS, tmp_path / "out.jsonl", skip_bad=True)
    assert (result.written, len(result.skipped)) == (1, 1)


def test_nothing_usable_and_out_over_the_source(jsonl, tmp_path):
    path = jsonl({"question": "a"})
    with pytest.raises(UserError, match=r"no usable row, the first: no field 'answer'"):
        convert(path, FIELDS, tmp_path / "out.jsonl", skip_bad=True)
    with pytest.raises(UserError, match="is the file to convert"):
        convert(path, FIELDS, path)


def test_list_skipped_is_short():
    lines = list_skipped([(f"f:{n}", "bad") for n in range(14)], most=3)
    assert lines == ["  f:0: bad", "  f:1: bad", "  f:2: bad", "  ... and 11 more"]


def test_command_converts_then_looks(jsonl, tmp_path, capsys, tokenizer):
    path = jsonl({"question": "the quick?", "answer": "brown fox jumps"}, {"question": "x"})
    out = tmp_path / "chat.jsonl"
    assert run("--from", path, "--user", "question", "--assistant", "answer", "--out", out, "--skip-bad") == 0
    shown = capsys.readouterr().out
    assert f"{out}: 1 conversations" in shown
    assert f"{path}:2: no field 'answer'" in shown
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    settings = [
        f"data.path={out}",
        f"data.tokenizer={tmp_path / 'tokenizer'}",
        f"data.cache={tmp_path / 'cache'}",
    ]
    assert run(*[part for setting in settings for part in ("--set", setting)]) == 0
    shown = capsys.readouterr().out
    assert "1 samples" in shown
    assert "supervised:" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "x.jsonl"], "also needs --user FIELD, --assistant FIELD, --out FILE"),
        (["--from", "x.jsonl", "--user", "q", "--assistant", "a", "--out", "y"], "x.jsonl: no such file"),
        (["--user", "q"], "belong to --from FILE"),
        (["--regenerate"], "say where the answers go with --out FILE"),
        (["--regenerate", "--out", "y", "--user", "q"], "convert with --from, --user and --assistant first"),
        (["--regenerate", "--out", "y", "--tokens", "--endpoint", "http://x"], "an endpoint gives text only"),
        (["--split", "test"], "must be train or heldout"),
        (["--set", "data.pth=x"], "did you mean 'path'"),
    ],
)
def test_command_refuses(arguments, message):
    with pytest.raises(UserError, match=message):
        run(*arguments)
