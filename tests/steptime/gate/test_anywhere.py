"""A gate in a repository that knows nothing of the harness."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from steptime.commands.gate import run_gate
from steptime.errors import UserError
from steptime.gate import anywhere
from steptime.gate.counters import added, count_both
from steptime.gate.verdict import Options
from steptime.machine.commit import git
from steptime.progress import Reporter
from steptime.report import formatting
from steptime.subjects.steps.kind import StepsKind
from steptime.subjects.steps.script import ScriptKind

QUIET = Reporter(quiet=True)
LIBRARY = """
import torch
def net(): return torch.nn.Linear(8, 2)
def loss_of(model, inputs):
    loss = model(inputs).square().mean()
    return loss
"""
SUBJECT = """
import torch
from lib import loss_of, net
from steptime import Steps
def make():
    model, batches = net(), [torch.randn(4, 8) for _ in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step(i):
        loss = loss_of(model, batches[i])
        loss.backward()
        optimizer.step(); optimizer.zero_grad()
        return loss.detach()
    return Steps(step, cycle=2, switches={})
"""
PLANTED = LIBRARY.replace("    return loss\n", "    loss.item()\n    return loss\n")


def commit(root: Path, **files: str) -> None:
    for name, text in files.items():
        (root / f"{name}.py").write_text(text)
    git("add", "-A", cwd=root)
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *who, "commit", "-qm", "x"], cwd=root, check=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Base has no subject; head has one and does the same work."""
    root = tmp_path / "repository"
    root.mkdir()
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    commit(root, lib=LIBRARY)
    commit(root, train=SUBJECT)
    monkeypatch.chdir(root)
    return root


def count(kind: StepsKind) -> tuple[dict[str, int | None], list[str]]:
    with anywhere.checked_out(kind, "HEAD^1", QUIET.say) as trees:
        orders = {tree.name: {"config": {}} for tree in trees}
        return added(count_both(kind, trees, orders, QUIET), "base", "head")


@pytest.mark.thorough
@pytest.mark.slow
def test_heads_subject_stands_over_a_base_without_one(repository: Path) -> None:
    found, faults = count(StepsKind("train.py").in_tree())
    assert not faults
    assert found["syncs"] == found["operations"] == 0
    assert git("worktree", "list", cwd=repository).count("\n") == 0  # type: ignore[union-attr]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.fault
def test_a_planted_sync_in_head_is_counted(repository: Path) -> None:
    commit(repository, lib=PLANTED)
    found, faults = count(StepsKind("train.py").in_tree())
    assert not faults
    assert found["syncs"] == 2  # one in each of two steps


@pytest.mark.thorough
@pytest.mark.parametrize(("library", "over"), [(LIBRARY + "# nothing\n", False), (PLANTED, True)])
def test_a_gate_finds_a_planted_sync_and_passes_nothing(
    repository: Path, tmp_path: Path, library: str, over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steptime.machine.state.unfit", lambda before, after: [])
    commit(repository, lib=library)
    kind = StepsKind("train.py")
    settings = kind.settings(None, ())
    options = Options("HEAD^1", settings, kind, minutes=0.05, launches=2, out=str(tmp_path / "out"))
    receipt = run_gate(options, QUIET)
    # Two launches are too few for a verdict on the time; the counts are exact.
    assert receipt.pairs
    assert any("head: syncs rose by 2" in reason for reason in receipt.reasons) == over
    assert not any("comparable" in reason or "rose by" in reason for reason in receipt.reasons if not over)


@pytest.mark.thorough
def test_a_gate_of_a_hugging_face_script_needs_no_code(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.setattr("steptime.machine.state.unfit", lambda before, after: [])
    example = Path(__file__).parents[3] / "examples" / "hf_trainer.py"
    script = example.read_text()
    commit(repository, train_hf=script)
    planted = script.replace("norm().item()", "norm().item() + one.grad.sum().item()")
    commit(repository, train_hf=planted)
    (repository / "scripts").mkdir()
    monkeypatch.chdir(repository / "scripts")
    kind = ScriptKind("hf", ["../train_hf.py"])
    options = Options(
        "HEAD^1", kind.settings(None, ()), kind, minutes=0.05, launches=2, out=str(tmp_path / "o")
    )
    receipt = run_gate(options, QUIET)
    assert receipt.pairs
    assert "head: syncs rose by 84" in receipt.reasons  # 21 gradients in each of four steps
    assert formatting.added_syncs(receipt)[0].startswith("head: train_hf.py:")


@pytest.mark.thorough
def test_an_environment_is_made_by_the_command_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said: list[str] = []
    (tmp_path / "requirements.txt").write_text("")
    command = "echo $VIRTUAL_ENV >> made.txt"
    python = anywhere.environment(tmp_path, command, said.append)
    assert anywhere.environment(tmp_path, command, said.append) == python != sys.executable
    assert (tmp_path / "made.txt").read_text().split() == [str(Path(python).parents[1])]
    assert len(said) == 1
    subprocess.run([python, "-c", "import tabulate"], check=True)  # from the environment of the gate


@pytest.mark.thorough
@pytest.mark.fault
def test_a_command_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="cannot make an environment: echo no >&2; exit 3: no"):
        anywhere.environment(tmp_path, "echo no >&2; exit 3", lambda text: None)
