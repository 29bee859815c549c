"""The arrows between rooms: the contracts in pyproject.toml hold, and a planted import breaks each of
them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    script = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", script, "--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )


def test_the_contracts_are_kept() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout
    assert "7 kept, 0 broken" in done.stdout


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ("dflash/config.py", "import steptime.progress", "dflash is not allowed to import steptime.progress"),
        ("steptime/errors.py", "import dflash.config", "steptime is not allowed to import dflash"),
        (
            "dflash/data/plan.py",
            "import dflash.pipeline.build",
            "dflash.data is not allowed to import dflash.pipeline",
        ),
        (
            "steptime/records/types.py",
            "import steptime.gate.verdict",
            "steptime.records is not allowed to import steptime.gate",
        ),
        (
            "steptime/statistics/verdict.py",
            "import dflash.config",
            "steptime is not allowed to import dflash",
        ),
        ("steptime/syncs/rules.py", "import transformers", "steptime is not allowed to import transformers"),
        ("bench/cellar/__init__.py", "", "not listed as layers: - bench.cellar"),
    ],
)
def test_a_planted_arrow_is_named(tmp_path: Path, file: str, line: str, said: str) -> None:
    for package in ("steptime", "dflash", "bench"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    place = tmp_path / file
    place.parent.mkdir(exist_ok=True)
    text = place.read_text() if place.exists() else ""
    place.write_text(f"{text}\n{line}\n")
    done = lint(tmp_path)
    assert done.returncode == 1
    assert said in " ".join(done.stdout.split()), done.stdout
