"""Which code was measured: the commit, and a hash of what is not committed."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from bench.records import Commit

ROOT = Path(__file__).resolve().parent.parent


def git(*arguments: str, cwd: Path = ROOT) -> str | None:
    """Output of a git command without its last newline; None when it fails or git is not there."""
    try:
        done = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.removesuffix("\n") if done.returncode == 0 else None


def read_commit(root: Path = ROOT) -> Commit:
    """The commit under `root`; `diff_hash` covers staged, unstaged and untracked files that git does not ignore.

    Outside a repository the id is empty, and the tree counts as dirty: what was measured cannot be named.
    """
    identity = git("rev-parse", "HEAD", cwd=root)
    if identity is None:
        return Commit(id="", dirty=True)
    status = git("status", "--porcelain", "--untracked-files=all", "-z", cwd=root) or ""
    if not status:
        return Commit(id=identity)
    digest = hashlib.sha256((git("diff", "HEAD", "--binary", cwd=root) or "").encode())
    for entry in sorted(status.split("\0")):
        if entry.startswith("?? "):
            digest.update(entry.encode())
            digest.update(_content(root / entry[3:]))
    return Commit(id=identity, dirty=True, diff_hash=digest.hexdigest()[:16])


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
