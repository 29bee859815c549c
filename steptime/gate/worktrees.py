"""Two trees to compare: the base commit and HEAD, each with an environment that fits it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from steptime.errors import UserError
from steptime.machine.commit import ROOT, git, read_commit
from steptime.records.types import Commit

LOCKS = ("pyproject.toml", "constraints.txt")
"""What an environment is made from: two trees whose copies agree share one."""
EXTRAS = {"cuda": "flash-linear-attention", "cupti": "cupti-python", "tensorboard": "tensorboard"}
"""A package by which an environment with that extra is known."""
WORKER = "bench/gate_worker.py"
PREFIX = "dflash-gate-"
"""Of a gate's temporary folder; its process id follows."""


@dataclass(frozen=True, slots=True)
class Tree:
    """One side of a gate: its commit, its folder, the Python that runs it, and the module of its process."""

    name: str
    commit: Commit
    root: Path
    python: str
    worker: str = "bench.gate_worker"


class NoHarness(Exception):
    """The base commit is older than the harness, so it cannot be measured."""


def resolve(reference: str, root: Path = ROOT) -> str:
    """The commit that a reference names.

    Raises:
        UserError: not a repository, or no such commit, with what to fetch.
    """
    if git("rev-parse", "--git-dir", cwd=root) is None:
        raise UserError("gate: this is not a git repository, so there is no base to compare with")
    found = git("rev-parse", "--verify", "--quiet", f"{reference}^{{commit}}", cwd=root)
    if found is None:
        shallow = git("rev-parse", "--is-shallow-repository", cwd=root) == "true"
        hint = (
            "this clone is shallow: git fetch --unshallow"
            if shallow
            else f"fetch it first: git fetch origin {reference}"
        )
        raise UserError(f"--base {reference}: no such commit here; {hint}")
    return found


@contextlib.contextmanager
def checked_out(reference: str, say: Callable[[str], None], root: Path = ROOT) -> Iterator[tuple[Tree, Tree]]:
    """(base, head) as trees; their worktrees are removed at the end.

    A clean HEAD gets a worktree of its own, so that edits made meanwhile do not reach the run. A dirty one is
    measured in place, and is labelled so.

    Raises:
        UserError: no such base. NoHarness: the base has no gate worker.
    """
    identity = resolve(reference, root)
    if git("cat-file", "-e", f"{identity}:{WORKER}", cwd=root) is None:
        raise NoHarness(
            f"base {identity[:10]} predates the harness (it has no {WORKER}): there is nothing to compare "
            "with"
        )
    head = read_commit(root)
    sweep(root)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-")))
        base_root = worktree(stack, root, folder / "base", identity)
        head_root = root if head.dirty else worktree(stack, root, folder / "head", head.id)
        python = sys.executable
        if _locks(base_root) != _locks(head_root):
            check_installed(head_root)
            python = _environment(base_root, say)
        yield Tree("base", Commit(identity), base_root, python), Tree("head", head, head_root, sys.executable)


def sweep(root: Path) -> None:
    """Remove the worktrees of gates that were killed before they could: a CI machine keeps its state."""
    for line in (git("worktree", "list", "--porcelain", cwd=root) or "").splitlines():
        place = Path(line.removeprefix("worktree "))
        owner = place.parent.name.removeprefix(PREFIX).partition("-")[0]
        if (
            line.startswith("worktree ")
            and place.parent.name.startswith(PREFIX)
            and owner.isdigit()
            and not _runs(int(owner))
        ):
            git("worktree", "remove", "--force", str(place), cwd=root)
            shutil.rmtree(place.parent, ignore_errors=True)
    git("worktree", "prune", cwd=root)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def worktree(stack: contextlib.ExitStack, root: Path, place: Path, commit: str) -> Path:
    if git("worktree", "add", "--detach", "--force", str(place), commit, cwd=root) is None:
        raise UserError(f"gate: cannot check out {commit[:10]} into {place}: see `git worktree list`")
    stack.callback(git, "worktree", "prune", cwd=root)
    stack.callback(git, "worktree", "remove", "--force", str(place), cwd=root)
    return place


def _locks(root: Path) -> str:
    digest = hashlib.sha256()
    for name in LOCKS:
        with contextlib.suppress(OSError):
            digest.update((root / name).read_bytes())
        digest.update(b"\0")
    return digest.hexdigest()


def check_installed(head: Path) -> None:
    """Head wants other packages than base, and runs in this environment: are they here?

    Raises:
        UserError: naming those that are not, and the command that installs them.
    """
    wrong = []
    with contextlib.suppress(OSError):
        for line in (head / "constraints.txt").read_text(encoding="utf-8").splitlines():
            name, _, wanted = line.partition("==")
            with contextlib.suppress(metadata.PackageNotFoundError):
                found = metadata.version(name.strip()) if wanted else ""
                if found.partition("+")[0] != wanted.strip().partition("+")[0]:
                    wrong.append(f"{name.strip()} is {found}, not {wanted.strip()}")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UserError(
            "gate: head's constraints.txt differs from base's, and this environment is not made from it: "
            f"{', '.join(wrong[:3])}"
            f"{more}; install it: python -m pip install -c constraints.txt -e '.[bench]'"
        )


def extras() -> str:
    """The extras that this environment has: base gets the same, or it would be slower for want of a
    kernel."""
    found = ["bench"]
    for extra, package in EXTRAS.items():
        with contextlib.suppress(metadata.PackageNotFoundError):
            metadata.version(package)
            found.append(extra)
    return ",".join(found)


def _environment(root: Path, say: Callable[[str], None]) -> str:
    """A virtual environment for a tree whose locks differ from ours; kept, by what it was made from.

    Raises:
        UserError: pip failed, with its last line.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash-harness"
    with_extras = extras()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    place = cache / f"env-{_locks(root)[:16]}-{version}-{with_extras.replace(',', '-')}"
    python = place / ("Scripts" if os.name == "nt" else "bin") / "python"
    if (place / "complete").exists() and python.exists():  # the Python that it was made with may be gone
        return str(python)
    say(f"gate: base needs other packages; making an environment for it in {place} (once)")
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(place)],
        [str(python), "-m", "pip", "install", "--quiet", "-c", "constraints.txt", f".[{with_extras}]"],
        [str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "dflash-harness"],
    ):
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(f"gate: cannot make an environment for base: {' '.join(command[1:4])}: {last}")
    (place / "complete").touch()
    return str(python)
