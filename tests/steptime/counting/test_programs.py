"""Whole programs that believe in a CUDA device: what a GPU would wait for, per step, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import cli
from steptime.errors import UserError

pytest_plugins = ["pytester"]
RECIPE = str(Path(__file__).parents[2] / "data/programs/recipe.py")
TO_DEVICE, PAGEABLE = "blocking copy to device", "pageable copy"
PROGRAMS = {
    "plain": {TO_DEVICE: 2},
    "numpy": {TO_DEVICE: 2},
    "workers": {TO_DEVICE: 2},
    "clipped": {TO_DEVICE: 2, "truth test": 1},
    "pinned": {},
    "on_device": {},
    "generator": {},
    "resumed": {},
    "running": {"item()": 1, TO_DEVICE: 1},
    "float16": {"item()": 1},
    "accepted": {TO_DEVICE: 2, "item()": 1},
    "aot_eager": {TO_DEVICE: 2, "truth test": 1, "item()": 1},
}
FRAMEWORKS = {
    "trainer": ("accelerate", {TO_DEVICE: 3, "truth test": 3}),
    "trainer log": ("accelerate", {TO_DEVICE: 3, "truth test": 1, "item()": 2}),
    "accelerate": ("accelerate", {"item()": 1}),
    "lightning": ("lightning", {PAGEABLE: 2}),
    "lightning bar": ("lightning", {PAGEABLE: 2, "item()": 1}),
}
"""Program, its library, and the waits of a step by that library's source."""


def counted(tmp_path: Path, words: list[str], *options: str) -> tuple[int, dict[str, float], dict]:
    file = tmp_path / "counts.json"
    code = cli.call(["syncs", "--json", str(file), *options, "--", *words])
    tree = json.loads(file.read_text())
    found: dict[str, float] = {}
    for row in tree["counts"]:
        found[row["kind"]] = found.get(row["kind"], 0) + row["count"] / max(1, tree["steps"])
    return code, found, tree


@pytest.mark.parametrize("habit", PROGRAMS)
def test_a_program_is_charged_what_a_gpu_would_wait_for(
    habit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, found, tree = counted(tmp_path, [RECIPE, habit], "--steps", "4")
    assert found == PROGRAMS[habit]
    assert (tree["steps"], tree["simulated"]) == (4, True)


@pytest.mark.slow
@pytest.mark.parametrize("words", FRAMEWORKS)
def test_a_frameworks_run_is_charged_what_a_gpu_would_wait_for(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, expected = FRAMEWORKS[words]
    pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    script = str(Path(RECIPE).with_name("framework.py"))
    _, found, _ = counted(tmp_path, [script, *words.split()], "--steps", "4")
    assert found == expected


def test_a_program_that_never_uses_the_device_is_counted_as_if_its_cpu_were_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found, _ = counted(tmp_path, [RECIPE, "cpu"])
    assert (code, found) == (0, counted(tmp_path, [RECIPE, "cpu"], "--as", "cpu")[1])
    assert sum(found.values()) > 0, "never a wrong zero"
    assert "put nothing on the simulated CUDA device" in capsys.readouterr().out


def test_what_cannot_be_simulated_is_said_in_one_line() -> None:
    with pytest.raises(UserError, match="cannot capture a CUDA graph"):
        cli.call(["syncs", "--", RECIPE, "graph"])


def test_a_crash_leaves_the_table_the_traceback_and_the_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found, tree = counted(tmp_path, [RECIPE, "crash"])
    told = capsys.readouterr()
    assert (code, tree["steps"], found[TO_DEVICE]) == (1, 5, 2)
    assert "RuntimeError: out of data" in told.err
    assert "run_script.py" not in told.err
    assert "in 5 of 5 steps, at most 2" in told.out


@pytest.mark.slow
def test_fail_means_new(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "syncs.toml"
    words = ["--", RECIPE, "accepted"]
    assert cli.call(["syncs", "--fail", *words]) == 1, "the copies are new"
    assert cli.call(["syncs", "--accepted", str(file), "--write", *words]) == 0
    assert "item()" not in file.read_text(), "its line says so itself"
    assert cli.call(["syncs", "--fail", "--accepted", str(file), *words]) == 0
    assert cli.call(["syncs", "--fail", "--accepted", str(file), "--", RECIPE, "clipped"]) == 1, "planted"
    capsys.readouterr()
    cli.call(["syncs", "--format", "github", *words])
    assert "::warning file=" in capsys.readouterr().out


def test_the_report_names_the_line_that_asked(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "model = torch.nn.Linear(4, 4).to('cuda')\n"
        "one, two = (torch.optim.SGD(model.parameters(), lr=0.0) for _ in range(2))\n"
        "for _ in range(5):\n"
        "    model(torch.ones(1, 4, device='cuda')).sum().backward()\n"
        "    one.step(); two.step()\n"
        "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)\n"
    )
    _, found, tree = counted(tmp_path, [str(tmp_path / "mine.py")])
    assert tree["steps"] == 3, "a round of two optimizers is one step"
    assert sum(found.values()) == 1
    assert "mine.py:8" in tree["counts"][0]["asked_by"]


PLUGIN = """
import torch

def test_reads(host_syncs):
    torch.ones(2, device="cuda").sum().item()
    assert not host_syncs.new

def test_accepted(host_syncs):
    torch.ones(2, device="cuda").sum().item()  # sync-ok: a test
    assert not host_syncs.new and host_syncs.all

def test_unused(host_syncs):
    torch.ones(2).sum().item()
    assert not host_syncs.new
"""


@pytest.mark.slow
def test_the_fixture_finds_new_syncs_and_proves_nothing_without_a_device(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    pytester.makepyfile(PLUGIN)
    result = pytester.runpytest_subprocess("-p", "steptime.counting.pytest_plugin", "-q")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["*put nothing on the simulated CUDA device*"])
