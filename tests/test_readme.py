"""Every command in the README runs: with a user's small data in place of long runs, and nothing else
changed."""

from __future__ import annotations

import ast
import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dflash.cli import run
from tests.pipeline.run import SMALL, write_ids

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Later settings win, so the README's own stay and only size, place and model change.
SMALL_RUN = (
    *SMALL,
    "train.steps=2",
    "train.accumulation=1",
    "observe.wandb=off",
    "target.model=tiny-hybrid",
    'target.devices=["cpu"]',
    'drafter.devices=["cpu"]',
)


SLOW = ("dflash eval", "dflash export", "python -m bench syncs")
"""They load a checkpoint, or start a process."""


def commands() -> list[str]:
    """The indented lines of the README that start a program."""
    found = re.findall(r"^    ((?:dflash|python -m|pytest) .*?)(?:\s{2,}#.*)?$", README, flags=re.MULTILINE)
    assert found, "the README shows no command"
    return sorted(set(found))


def nox_sessions() -> set[str]:
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list}


def small(words: list[str]) -> list[str]:
    return [*words, *(part for value in SMALL_RUN for part in ("--set", value))]


def train(words: list[str], folder: Path) -> None:
    if "--dry-run" in words:
        assert run(words) == 0
        return
    ids = write_ids(folder / "chats.jsonl")
    assert run([*small(words), "--set", f"data.path={ids}", "--out", str(folder / "run")]) == 0
    assert (folder / "run" / "summary.json").exists()


def prepare(words: list[str], folder: Path) -> None:
    (folder / "questions.jsonl").write_text(
        json.dumps({"question": "1 + 1?", "answer": "2, of course."}) + "\n"
    )
    assert run(words) == 0
    assert json.loads((folder / words[words.index("--out") + 1]).read_text().splitlines()[0])


@functools.cache
def trained_once(folder: Path) -> Path:
    """A small run, made once for all commands, beside the ids that it read."""
    folder.mkdir()
    ids = write_ids(folder / "ids.jsonl")
    assert run([*small(["train"]), "--set", f"data.path={ids}", "--out", str(folder / "run")]) == 0
    return folder


def trained(words: list[str], folder: Path) -> None:
    """The run that the command speaks of."""
    made = trained_once(folder.parent / "trained")
    shutil.copy(made / "ids.jsonl", folder)
    shutil.copytree(made / "run", words[words.index("--checkpoint") + 1])


def export(words: list[str], folder: Path) -> None:
    trained(words, folder)
    assert run(words) == 0
    assert (folder / words[words.index("--out") + 1] / "model.safetensors").exists()


def evaluate(words: list[str], folder: Path) -> None:
    trained(words, folder)
    assert (
        run(
            [
                *words,
                "--prompts",
                str(folder / "ids.jsonl"),
                "--max-new-tokens",
                "8",
                "--out",
                str(folder / "eval"),
            ]
        )
        == 0
    )
    assert json.loads((folder / "eval" / "eval.json").read_text())["figures"]["lossless"] is True


def doctor(words: list[str], folder: Path) -> None:
    assert run(words) == 0


def checked_elsewhere(words: list[str], folder: Path) -> None:
    """Commands whose behaviour has tests of its own; here only that they are known."""
    known(words[4:], [sys.executable, "-m", "bench", words[3], "--help"])


def known(words: list[str], help_command: list[str]) -> None:
    shown = subprocess.run(help_command, capture_output=True, text=True, cwd=ROOT)
    assert shown.returncode == 0, shown.stderr
    for word in words:
        if word.startswith("--") and word != "--":
            assert word.partition("=")[0] in shown.stdout


def nox_session(words: list[str], folder: Path) -> None:
    assert words[words.index("-s") + 1] in nox_sessions()


def install(words: list[str], folder: Path) -> None:
    """What CI's own environment is made of: the lock, and the project with an extra that it has."""
    assert (ROOT / words[words.index("-c") + 1]).exists()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (
        words[words.index("-e") + 1].removeprefix(".[").removesuffix("]") in project["optional-dependencies"]
    )


def pytest_face(words: list[str], folder: Path) -> None:
    assert (ROOT / "bench" / "conftest.py").exists()


RUNNERS = {
    "dflash train": train,
    "dflash prepare": prepare,
    "dflash eval": evaluate,
    "dflash export": export,
    "dflash doctor": doctor,
    "python -m bench": checked_elsewhere,
    "python -m nox": nox_session,
    "python -m pip install nox && python -m nox": nox_session,
    "python -m pip install -c": install,
    "pytest bench/": pytest_face,
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "command",
    [pytest.param(one, marks=[pytest.mark.slow] if one.startswith(SLOW) else []) for one in commands()],
)
def test_the_command_runs(command, tmp_path, monkeypatch):
    runner = next((call for prefix, call in RUNNERS.items() if command.startswith(prefix)), None)
    assert runner is not None, f"no test runs {command!r}: add one to RUNNERS"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    words = shlex.split(command)
    runner(words[1:] if words[0] == "dflash" else words, tmp_path)


def test_the_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\(((?!http)[^)#]+)\)", README):
        assert (ROOT / target).exists(), target
