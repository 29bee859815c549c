"""Which code was measured: the commit, and a hash of what is not committed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import uuid
from pathlib import Path

from steptime.records.types import Commit

ROOT = Path(__file__).resolve().parents[2]


def search_path(root: Path) -> str:
    """PYTHONPATH of a process that runs the code of a tree: the tree, and this package where it is no part of
    the tree and is not installed."""
    ours = root == ROOT or (root / "steptime").is_dir()
    installed = ROOT.name in ("site-packages", "dist-packages")
    places = [
        root,
        *([root / "src"] if (root / "src").is_dir() else []),
        *([] if ours or installed else [ROOT]),
    ]
    return os.pathsep.join(map(str, places))


def git(*arguments: str, cwd: Path = ROOT) -> str | None:
    """Output of a git command without its last newline; None when it fails or git is not there."""
    found = git_bytes(*arguments, cwd=cwd)
    return None if found is None else found.decode("utf-8", "surrogateescape").removesuffix("\n")


def git_bytes(*arguments: str, cwd: Path = ROOT) -> bytes | None:
    """The same as it came: file names and differences need not be UTF-8."""
    try:
        done = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def read_commit(root: Path = ROOT) -> Commit:
    """The commit under `root`; `diff_hash` covers staged, unstaged and untracked files that git does not
    ignore.

    Outside a repository the id is empty, and the tree counts as dirty: what was measured cannot be named.
    Where git does not tell what changed, the tree counts as dirty too, with changes that equal no others."""
    identity = git("rev-parse", "HEAD", cwd=root)
    if identity is None:
        return Commit(id="", dirty=True)
    status = git("status", "--porcelain", "--untracked-files=all", "-z", cwd=root)
    if status == "":
        return Commit(id=identity)
    difference = git_bytes("diff", "HEAD", "--binary", cwd=root)
    if status is None or difference is None:
        return Commit(id=identity, dirty=True, diff_hash=f"unknown-{uuid.uuid4().hex[:8]}")
    digest = hashlib.sha256(difference)
    for entry in sorted(status.split("\0")):
        if entry.startswith("?? "):
            digest.update(os.fsencode(entry))
            digest.update(_content(root / entry[3:]))
    return Commit(id=identity, dirty=True, diff_hash=digest.hexdigest()[:16])


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
