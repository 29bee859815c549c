"""A gate in any repository: two worktrees, each with an environment that fits it. Nothing is asked of the
base but the subject's file, and where it has none, head's stands over base's code."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from steptime.errors import UserError
from steptime.gate.worktrees import PREFIX, Tree, resolve, sweep, worktree
from steptime.machine.commit import read_commit
from steptime.records.types import Commit
from steptime.subjects.steps.kind import LoopKind

LOCKS = {
    "uv.lock": "uv sync --frozen --active",
    "poetry.lock": "poetry install",
    "requirements.txt": "python -m pip install --quiet -r requirements.txt",
}
"""What an environment is made from, and the command that makes it."""
DECLARED = ("pyproject.toml", "setup.py", "setup.cfg")
"""Part of an environment's name; a change here alone does not call for another one."""


@contextlib.contextmanager
def checked_out(
    kind: LoopKind,
    reference: str,
    say: Callable[[str], None],
    *,
    install: str = "",
    head_subject: bool = False,
) -> Iterator[tuple[Tree, Tree]]:
    """(base, head) as trees; their worktrees are removed at the end. A dirty head is measured in place.

    Args:
        kind: named from the top of its repository (`in_tree`).
        install: shell command that installs what a tree needs, in the tree; empty: by its own lock, where the
            two differ.
        head_subject: head's subject over base's code, though base has one.

    Raises:
        UserError: no such base, or an environment that cannot be made.
    """
    root, place = kind.root, kind.place
    identity, head = resolve(reference, root), read_commit(root)
    sweep(root)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-")))
        base_root = worktree(stack, root, folder / "base", identity)
        head_root = root if head.dirty else worktree(stack, root, folder / "head", head.id)
        if place.endswith(".py") and (head_subject or not (base_root / place).exists()):
            say(f"gate: head's {place} stands over base's code")
            if not (head_root / place).exists():
                raise UserError(f"gate: {place} is ignored by git and HEAD has none: commit it")
            (base_root / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(head_root / place, base_root / place)
        pythons = [sys.executable] * 2
        if install or _locks(base_root) != _locks(head_root):
            pythons = [environment(one, install, say) for one in (base_root, head_root)]
        worker = kind.doors.gate
        yield (
            Tree("base", Commit(identity), base_root, pythons[0], worker),
            Tree("head", head, head_root, pythons[1], worker),
        )


def environment(root: Path, install: str, say: Callable[[str], None]) -> str:
    """Python of a virtual environment for a tree; kept, by what it was made from. What it lacks comes from
    the environment that runs the gate.

    Raises:
        UserError: the command failed, with its last line.
    """
    command = install or next((LOCKS[name] for name in LOCKS if (root / name).exists()), "")
    if not command:
        return sys.executable
    digest = hashlib.sha256(f"{sys.version} {sys.prefix} {command}".encode())
    digest.update(_locks(root, *DECLARED).encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "steptime"
    place = cache / f"env-{digest.hexdigest()[:16]}"
    python = place / ("Scripts" if os.name == "nt" else "bin") / "python"
    if (place / "complete").exists() and python.exists():
        return str(python)
    say(f"gate: making an environment in {place} (once): {command}")
    _call([sys.executable, "-m", "venv", "--clear", str(place)], root)
    own = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    # `addsitedir` reads the .pth files there as well, which a bare path would not: editable installs.
    fallback = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    Path(own, "steptime-fallback.pth").write_text(fallback, encoding="utf-8")
    found = {"VIRTUAL_ENV": str(place), "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    _call(command, root, {**os.environ, **found})
    (place / "complete").touch()
    return str(python)


def _call(command: str | list[str], root: Path, environment: dict[str, str] | None = None) -> None:
    shell = isinstance(command, str)
    done = subprocess.run(command, cwd=root, env=environment, shell=shell, capture_output=True, text=True)
    if done.returncode != 0:
        last = ((done.stderr or done.stdout).strip().splitlines() or ["no message"])[-1]
        told = command if isinstance(command, str) else " ".join(command[1:4])
        raise UserError(f"gate: cannot make an environment: {told}: {last}")


def _locks(root: Path, *more: str) -> str:
    digest = hashlib.sha256()
    for name in (*LOCKS, *more):
        with contextlib.suppress(OSError):
            digest.update((root / name).read_bytes())
        digest.update(b"\0")
    return digest.hexdigest()
