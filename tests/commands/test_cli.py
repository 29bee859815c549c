"""The command line: a user's mistake is one clear line and exit code 2, before any model is loaded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflash.cli import run
from dflash.data.tokenizer import train_tokenizer
from dflash.pipeline.checkpoint import checkpoints
from tests.pipeline.run import SMALL, write_ids
from tests.waiting import HANG_S, wait_until

GOOD_CHAT = {"messages": [{"role": "user", "content": "Say hi."}, {"role": "assistant", "content": "Hi."}]}


@pytest.fixture
def no_model(monkeypatch):
    """Any attempt to load weights is an error of the test."""

    def load(*_arguments, **_named):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("dflash.pipeline.build.load_target", load)


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("corpus")


def arguments(*settings: str, data=None) -> list[str]:
    values = [*SMALL, *settings, *([f"data.path={data}"] if data else [])]
    return ["train", *(part for value in values for part in ("--set", value))]


def lines(*rows) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


IDS = {"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 0, 1, 1, 1, 1]}
NO_ANSWER = {"messages": [{"role": "user", "content": "Say hi."}]}

BAD_INPUT = {
    "missing file": (["data.path=nowhere.jsonl"], None, "nowhere.jsonl: no such file"),
    "broken JSON": ([], lines(IDS, IDS, "{broken"), "data.jsonl:3: not valid JSON"),
    "unknown key": (["drafter.layrs=2"], lines(IDS), "unknown key 'drafter.layrs'; did you mean 'layers'?"),
    "wrong type": (["train.steps=many"], lines(IDS), "train.steps = 'many': input should be a valid integer"),
    "hidden size": (
        ["drafter.hidden_size=48"],
        lines(IDS),
        "drafter.hidden_size = 48: target 'tiny-hybrid' has 32",
    ),
    "empty data set": ([], "", "the data set is empty"),
    "mask token": (
        ["drafter.mask_token_id=64"],
        lines(IDS),
        "drafter.mask_token_id = 64: outside the target's vocabulary of 64",
    ),
    "token outside": ([], lines(IDS | {"input_ids": [1, 2, 3, 4, 5, 99]}), "data.jsonl:1: "),
    "no format": ([], lines({"question": "1+1", "answer": "2"}), "dflash prepare --from"),
    "no such target": (["target.model=./nothing"], lines(IDS), "target.model = './nothing': no such folder"),
    "taps": (["target.layer_ids=[1, 9]"], lines(IDS), "below tiny-hybrid's 5 layers"),
    "no CUDA device": (['target.devices=["cuda:77"]'], lines(IDS), "device 'cuda:77': this machine has"),
    "queue": (["queue.hs_min_ready=9"], lines(IDS), "queue.hs_min_ready = 9 is over queue.capacity = 4"),
    "collector": (
        ['observe.collectors=["profle"]'],
        lines(IDS),
        "unknown collector 'profle'; did you mean 'pro",
    ),
    "objective": (["objective.kind=kt"], lines(IDS), "unknown objective 'kt'; did you mean 'kd'?"),
    "sink": (['observe.sinks=["jsnl"]'], lines(IDS), "unknown sink 'jsnl'; did you mean 'jsonl'?"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2(case, tmp_path, monkeypatch, capsys, no_model):
    settings, content, words = BAD_INPUT[case]
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data.jsonl"
    if content is not None:
        data.write_text(content)
    assert run(arguments(*settings, data=None if content is None else data)) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("dflash: error: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_conversation_without_an_answer_is_named_by_its_line(tmp_path, monkeypatch, capsys, no_model):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text(lines(GOOD_CHAT, NO_ANSWER))
    train_tokenizer(["Say hi."] * 3, 300).save_pretrained(tmp_path / "tokenizer")
    own = (f"data.tokenizer={tmp_path / 'tokenizer'}", f"data.cache={tmp_path / 'cache'}")
    assert run(arguments("target.tiny.vocab_size=512", "data.path=data.jsonl", *own)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "data.jsonl:2: " in error
    assert "assistant" in error


def test_a_missing_config_and_a_broken_one(tmp_path, capsys):
    assert run(["train", "--config", str(tmp_path / "none.toml")]) == 2
    broken = tmp_path / "broken.toml"
    broken.write_text("[data\n")
    assert run(["train", "--config", str(broken)]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "none.toml: cannot read the config" in first
    assert "broken.toml: not valid TOML" in second


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "--confg", "x"], "no such option --confg; did you mean '--config'?"),
        (["trian"], "no such command 'trian'; did you mean 'train'?"),
        (["eval", "--limit", "x"], "argument --limit: "),
        (["eval", "--limit"], "option '--limit' requires an argument"),
        (["export", "--out", "x"], "missing option '--checkpoint'"),
        (["train", "x"], "unexpected extra argument"),
    ],
)
def test_a_mistake_in_the_words_is_one_line_and_names_the_nearest(words, said, capsys):
    assert run(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("dflash: error: ")
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_without_words_the_help_is_shown_and_the_code_is_2(capsys):
    assert run([]) == 2
    captured = capsys.readouterr()
    assert "train" in captured.out
    assert captured.err == ""


def test_ctrl_c_is_130_and_says_so(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("dflash.commands.checks.examine", interrupted)
    assert run(["doctor"]) == 130
    assert capsys.readouterr().err == "dflash: interrupted\n"


@pytest.mark.parametrize("name", ["cpu-tiny", "h200-single", "pro6000x8-qwen3.6-27b"])
def test_every_config_prints_its_plan_within_80_columns(name, capsys, cache, monkeypatch):
    # The built-in corpus is not what is tested: ids of the user's own stand in for it, under a short name.
    write_ids(cache / "plan.jsonl")
    config, ids = Path("configs", f"{name}.toml").resolve(), "plan.jsonl"
    monkeypatch.chdir(cache)
    over = ["--set", f"data.path={ids}", "--set", "drafter.mask_token_id=4095"] if name == "cpu-tiny" else []
    assert run(["train", "--config", str(config), "--dry-run", *over]) == 0
    out = capsys.readouterr().out
    for words in ("target/0", "drafter/0", "parameters", "memory (GB)", "context tokens", "steps"):
        assert words in out
    assert max(len(line) for line in out.splitlines()) <= 80


def test_the_published_plan_of_the_reference_machine(capsys):
    assert run(["train", "--config", "configs/pro6000x8-qwen3.6-27b.toml", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "tapped layers 1, 16, 31, 46, 61" in out
    assert "1,730." in out  # the published size of a 27B-class drafter, millions
    assert "mask token 248070" in out


@pytest.mark.slow
@pytest.mark.timeout(4 * HANG_S)
def test_sigterm_finishes_the_step_writes_a_checkpoint_and_the_run_resumes(tmp_path):
    ids = write_ids(tmp_path / "ids.jsonl")
    command = [
        sys.executable,
        "-m",
        "dflash",
        *arguments("train.steps=100000", data=ids),
        "--out",
        str(tmp_path / "run"),
    ]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    metrics = tmp_path / "run" / "metrics.jsonl"

    def it_trains() -> bool:
        return process.poll() is not None or (metrics.exists() and "train/loss" in metrics.read_text())

    wait_until(it_trains)
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate(timeout=HANG_S)
    assert process.returncode == 128 + signal.SIGTERM, error
    assert "stopping after this step" in error
    assert "stopped after" in out
    saved = checkpoints(tmp_path / "run" / "checkpoints")
    assert len(saved) == 1
    assert json.loads((saved[0] / "state.json").read_text())["progress"]["step"] > 0
