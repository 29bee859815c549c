"""Every command of a page runs: with a user's small data in place of long runs, and nothing else changed.

The pages are those that people write. Programs make docs/metrics.md, docs/syncs.md and, on a GPU,
docs/gpu-check.md, and other tests hold those.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
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
from tests.waiting import HANG_S

ROOT = Path(__file__).parent.parent
MADE = ("metrics.md", "syncs.md", "gpu-check.md", "reliability.md", "soak.md")
PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "baselines/README.md")),
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name not in MADE),
)
COLUMNS = 110
"""Of a page's prose. Tables, reports and commands are as wide as they are."""
STARTS = r"((?:dflash|steptime|python -m|pytest) .*?)(?:\s{2,}#.*)?$"
"""A line that starts a program, and the remark behind it."""
OURS = r"`((?:baselines|bench|configs|dflash|docs|steptime|tests|\.github)/[\w./*-]*)`"
"""A file or folder of this repository, named in a page's prose."""
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

TWO_DEVICES = (
    'target.devices=["cuda:0"]',
    'drafter.devices=["cuda:1"]',
    "target.dtype=float32",
    "drafter.dtype=float32",
    "queue.capacity=2",
    "queue.hs_min_ready=1",
    "train.accumulation=1",
)
"""What a simulated layout is cut down to; whole ones have tests of their own."""

DAILY = (
    "dflash train --set train.steps",
    "steptime syncs",
)
"""A command of each program; the others are slow tests."""


def commands() -> list[str]:
    """The lines of the pages that start a program, indented or in a fence."""
    found: list[str] = []
    for page in PAGES:
        text, fences = page.read_text(encoding="utf-8"), r"^```\n(.*?)^```"
        lines = re.findall(r"^    (.*)$", text, flags=re.MULTILINE)
        for fence in re.findall(fences, text, flags=re.DOTALL | re.MULTILINE):
            lines += fence.splitlines()
        found += [match[1] for line in lines if (match := re.match(STARTS, line))]
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
    if "--simulate" in words:
        assert run([*words, *(part for value in TWO_DEVICES for part in ("--set", value))]) == 0
        return
    ids = write_ids(folder / "chats.jsonl")
    assert run([*small(words), "--set", f"data.path={ids}", "--out", str(folder / "run")]) == 0
    assert (folder / "run" / "summary.json").exists()


def on_ranks(words: list[str], folder: Path) -> None:
    """`python -m torch.distributed.run --standalone ... -m dflash train ...`."""
    ids, command = write_ids(folder / "chats.jsonl"), [sys.executable, *words[1:]]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*small(command), "--set", f"data.path={ids}", "--out", str(folder / "run")],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert (
        json.loads((folder / "run" / "checkpoints/latest/state.json").read_text())["settings"]["ranks"] == 2
    )


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
    names = words[3:5] if words[3] == "baseline" else words[3:4]
    known(words[3 + len(names) :], [sys.executable, "-m", "bench", *names, "--help"])


def any_trainer(words: list[str], folder: Path) -> None:
    """`steptime ...`: the same commands by another name; here only that they are known."""
    known(words[2:], [sys.executable, "-m", "steptime", words[1], "--help"])


def module(words: list[str], folder: Path) -> None:
    assert importlib.util.find_spec(words[2]) is not None


def known(words: list[str], help_command: list[str]) -> None:
    shown = help_text(tuple(help_command))
    for word in words:
        if word.startswith("--") and word != "--":
            assert word.partition("=")[0] in shown


@functools.cache
def help_text(command: tuple[str, ...]) -> str:
    environment = os.environ | {"COLUMNS": "200"}
    shown = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


def nox_session(words: list[str], folder: Path) -> None:
    assert words[words.index("-s") + 1] in nox_sessions()


def install(words: list[str], folder: Path) -> None:
    """What CI's own environment is made of: the lock, and the project with an extra that it has."""
    assert (ROOT / words[words.index("-c") + 1]).exists()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = words[words.index("-e") + 1].removeprefix(".[").removesuffix("]")
    assert extra in project["optional-dependencies"]
    lock = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = {line.partition("==")[0] for line in lock.splitlines()}
    assert set(words[words.index("-e") + 2 :]) <= pinned


def hooks(words: list[str], folder: Path) -> None:
    assert (ROOT / ".pre-commit-config.yaml").exists()


def nox_alone(words: list[str], folder: Path) -> None:
    assert words[-1] == "nox"


def pytest_face(words: list[str], folder: Path) -> None:
    assert (ROOT / "bench" / "conftest.py").exists()


def long_tests(words: list[str], folder: Path) -> None:
    """They take minutes: here they are only collected."""
    file = next(word for word in words if word.endswith(".py"))
    environment = os.environ | {"PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", *words[3:]]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert shown.returncode == 0, shown.stdout
    assert file in shown.stdout


RUNNERS = {
    "dflash train": train,
    "dflash prepare": prepare,
    "dflash eval": evaluate,
    "dflash export": export,
    "dflash doctor": doctor,
    "python -m bench ": checked_elsewhere,
    "steptime ": any_trainer,
    "python -m bench.": module,
    "python -m torch.distributed.run": on_ranks,
    "python -m dflash.": module,
    "python -m nox": nox_session,
    "python -m pip install nox && python -m nox": nox_session,
    "python -m pip install -c": install,
    "python -m pip install pre-commit": hooks,
    "python -m pip install nox": nox_alone,
    "pytest bench/": pytest_face,
    "python -m pytest": long_tests,
}


@pytest.mark.timeout(5 * HANG_S)
@pytest.mark.parametrize(
    "command",
    [pytest.param(one, marks=[] if one.startswith(DAILY) else [pytest.mark.slow]) for one in commands()],
)
def test_the_command_runs(command, tmp_path, monkeypatch):
    runner = next((call for prefix, call in RUNNERS.items() if command.startswith(prefix)), None)
    assert runner is not None, f"no test runs {command!r}: add one to RUNNERS"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    words = shlex.split(command)
    runner(words[1:] if words[0] == "dflash" else words, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    """Its links, and the files and folders of this repository in its prose."""
    assert missing(prose(page.read_text(encoding="utf-8")), page.parent) == []


@pytest.mark.fault
def test_a_name_of_nothing_and_a_wide_line_would_be_seen() -> None:
    text = "See [this](docs/gone.md), `bench/gone.py` and `bench/cli.py`.\n```\n`bench/example.py`\n```\n"
    assert missing(prose(text), ROOT) == ["docs/gone.md", "bench/gone.py"]
    assert wide(f"| {'x' * COLUMNS} |\n{'x' * (COLUMNS + 1)}\n") == ["x" * (COLUMNS + 1)]


def missing(text: str, folder: Path) -> list[str]:
    links = [
        target for target in re.findall(r"\]\(((?!http)[^)#]+)\)", text) if not (folder / target).exists()
    ]
    return links + [name for name in re.findall(OURS, text) if not list(ROOT.glob(name.rstrip("/")))]


def test_the_drawings_use_the_names_of_the_code() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = set(re.findall(r"\b(?:[A-Z][a-z]+){2,}\b", text)) - {"TensorBoard"}
    sources = [
        path.read_text(encoding="utf-8")
        for room in ("dflash", "bench", "steptime")
        for path in (ROOT / room).rglob("*.py")
    ]
    defined = {name for source in sources for name in re.findall(r"^class (\w+)", source, flags=re.MULTILINE)}
    assert len(drawn) >= 8
    assert drawn <= defined


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_narrow(page: Path) -> None:
    assert wide(prose(page.read_text(encoding="utf-8"))) == []


def wide(text: str) -> list[str]:
    return [line for line in text.splitlines() if len(line) > COLUMNS and not line.startswith(("|", "    "))]


def prose(text: str) -> str:
    """A page without its fences."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
