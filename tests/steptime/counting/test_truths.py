"""Programs of other people's kinds of training: what each waits for, by the rules of CUDA."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import cli
from tests.steptime.counting.truths import PROGRAMS, Program
from tests.waiting import HANG_S

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
FOLDER = Path(__file__).parents[2] / "data" / "programs"
PER_STEP = {
    ("accelerate_accumulation.py",): (("accelerate",), 4),
    ("trl_sft.py",): (("trl", "accelerate"), 12),
    ("trl_sft.py", "--packing"): (("trl", "accelerate"), 15),
    ("nanogpt_like.py",): ((), 1 / 18),
    ("diffusers_unet.py",): (("diffusers",), 0),
    ("peft_lora.py",): (("peft",), 0),
    ("torchtitan_like.py",): ((), 2.2),
    ("sentence_transformers_pairs.py",): (("sentence_transformers", "accelerate"), 10),
}
"""The program and its arguments -> what it needs, and its host syncs per step by a reading of the sources."""


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_the_truth_table(program: Program, tmp_path: Path) -> None:
    torch._dynamo.reset()
    path, counts = tmp_path / "train.py", tmp_path / "counts.json"
    path.write_text(program.text)
    assert cli.call(["syncs", "--json", str(counts), "--", str(path)]) == 0
    tree = json.loads(counts.read_text())
    found: dict[str, float] = {}
    for row in tree["counts"]:
        found[row["kind"]] = found.get(row["kind"], 0) + row["count"] / max(1, tree["steps"])
    assert found == pytest.approx(program.right)
    assert tree["steps"] == program.steps if program.steps is not None else tree["steps"] >= 4


@pytest.mark.slow
@pytest.mark.parametrize("words", PER_STEP, ids=" ".join)
def test_the_counts_are_those_of_the_sources(words: tuple[str, ...], tmp_path: Path) -> None:
    needed, right = PER_STEP[words]
    for package in needed:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    counts = tmp_path / "counts.json"
    command = [sys.executable, "-m", "bench", "syncs", "--json", str(counts), "--", str(FOLDER / words[0])]
    done = subprocess.run([*command, *words[1:]], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-2000:]
    tree = json.loads(counts.read_text())
    assert tree["syncs"] / tree["steps"] == pytest.approx(right)
