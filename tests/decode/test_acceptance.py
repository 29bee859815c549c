"""The acceptance bench in small: its rows, its schedule, and all of its stages on a file of a user's own."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest

from bench.acceptance.__main__ import main
from bench.acceptance.language_model import Training, batches_of, rows_of
from dflash.data.batch import Sample


def samples(*lengths):
    return [
        Sample(np.full(length, 100 * (i + 1), np.int32) + np.arange(length), np.ones(length, bool), "x:1")
        for i, length in enumerate(lengths)
    ]


def test_a_row_begins_with_the_beginning_of_a_conversation_and_is_full():
    rows = list(islice(rows_of(samples(5, 9, 30, 3), 15, seed=0), 50))
    assert {len(row) for row in rows} == {16}
    assert {int(row[0]) for row in rows} == {100, 200, 300, 400}
    for row in rows:
        starts = [place for place in range(16) if row[place] % 100 == 0]
        for place in range(16):
            if place not in starts:
                assert row[place] == row[place - 1] + 1


def test_one_seed_gives_one_order():
    first, second, other = (next(batches_of(samples(5, 9, 30, 3), 8, 15, seed)) for seed in (0, 0, 1))
    assert first.shape == (8, 16)
    assert first.equal(second)
    assert not first.equal(other)


def test_the_rate_rises_and_falls():
    training = Training(tokens=100 * 4096, lr=1.0)
    rates = [training.rate(step) for step in range(training.steps)]
    assert training.steps == 100
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == rates[4] == 1.0
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


def test_what_is_asked_for_goes_over_the_recipe(monkeypatch):
    recipes = []
    monkeypatch.setattr("bench.acceptance.stages.AcceptanceRun", lambda recipe, *rest: recipes.append(recipe))
    for words in (["--answers", "0", "--steps", "7", "--target-tokens", "9", "--goal", "2.6"], []):
        with pytest.raises(AttributeError, match="all"):
            main(words)
    recipe, standard = recipes
    assert (recipe.answers, recipe.steps, recipe.target.tokens, recipe.goal) == (0, 7, 9, 2.6)
    assert standard.goal == 2.3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "x.jsonl"], "--data and --heldout go together"),
        (["--config", "no.toml"], "no.toml: cannot read the config"),
        (["--anwers", "3"], "no such option --anwers; did you mean '--answers'"),
    ],
)
def test_mistakes_are_one_line(arguments, message, tmp_path, capsys):
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    shown = capsys.readouterr().err.strip()
    assert message in shown
    assert "\n" not in shown


@pytest.fixture
def files(tmp_path):
    """Arithmetic as a user's own files: not in a chat format."""
    for name, start, count in (("train", 0, 40), ("heldout", 40, 4)):
        rows = [
            {"question": f"What is {i} plus {i + 1}?", "answer": f"{i} plus {i + 1} is {2 * i + 1}."}
            for i in range(start, start + count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.slow
def test_all_stages_on_a_users_own_files(files, capsys):
    small = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 16,
        "vocab_size": 320,
    }
    small |= {"layers": 5, "linear_heads": 1, "linear_head_dim": 16}
    arguments = [
        "--data",
        files / "train.jsonl",
        "--heldout",
        files / "heldout.jsonl",
        "--out",
        files / "out",
        "--goal",
        "1",
    ]
    arguments += [
        "--target-tokens",
        12_000,
        "--answers",
        16,
        "--answer-tokens",
        12,
        "--steps",
        12,
        "--prompts",
        2,
    ]
    for setting in (
        *(f"target.tiny.{name}={value}" for name, value in small.items()),
        "target.taps=2",
        "drafter.layers=1",
        f"data.cache={files / 'cache'}",
        "observe.terminal=off",
    ):
        arguments += ["--set", setting]
    assert main([str(argument) for argument in arguments]) == 0
    written = json.loads((files / "out" / "acceptance.json").read_text())
    assert written["lossless"]
    assert written["reached"]
    assert written["before"]["prompts"] == 2
    assert written["after"]["tau"] >= 1.0
    assert written["target"]["last_loss"] < written["target"]["first_loss"]
    assert set(written["seconds"]) == {"corpus", "target", "answers", "drafter", "evaluation"}
    assert "before" in capsys.readouterr().err
    made = {path: path.stat().st_ino for path in (files / "out").rglob("*.safetensors")}
    assert len(made) >= 2, "a target and a drafter"
    # The same command again finds every stage done; a goal out of reach is exit code 1.
    assert main([str(argument) for argument in [*arguments, "--goal", "9"]]) == 1
    again = json.loads((files / "out" / "acceptance.json").read_text())
    assert again["after"]["tau"] == written["after"]["tau"]
    assert made == {path: path.stat().st_ino for path in (files / "out").rglob("*.safetensors")}
    assert not again.get("target"), "nothing was trained, so no losses are told"
