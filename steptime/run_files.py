"""The folder of a run, files written whole or not at all, the CI job's summary, and the environment of child
processes."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from steptime.errors import UserError
from steptime.files import atomic_text

DEFAULT_ROOT = Path("bench-out")
SUMMARY = "GITHUB_STEP_SUMMARY"
"""Names the file that a CI job shows to whoever opens it."""


def choose_folder(out: str | Path | None, command: str) -> Path:
    """`--out`, or a folder of its own under bench-out; made, and seen to be writable, before anything is
    measured.

    A receipt that lies there from an earlier run is removed, so that a run that dies leaves none instead of a
    stale one.

    Raises:
        UserError: the folder cannot be written.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    folder = Path(out) if out else DEFAULT_ROOT / f"{command}-{stamp}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("receipt.json", "report.md", "report.html"):
            (folder / name).unlink(missing_ok=True)
        write(folder / ".writable", "")
        (folder / ".writable").unlink()
    except OSError as error:
        raise UserError(f"--out {folder}: cannot write there: {error.strerror}") from None
    if not out:
        (DEFAULT_ROOT / ".gitignore").write_text("*\n", encoding="utf-8")
    return folder


def post_summary(text: str) -> None:
    """Add Markdown to the CI job's summary, where there is one: also, and most of all, when the job is
    red."""
    summary = os.environ.get(SUMMARY)
    if summary:
        with open(summary, "a", encoding="utf-8") as handle:
            handle.write(text + "\n")


def child_environment() -> dict[str, str]:
    """For a measurement that is part of another one: only the whole posts to the job's summary, and no child
    with a planted fault tells a reader that something is wrong."""
    return {name: value for name, value in os.environ.items() if name != SUMMARY}


def write(path: Path, text: str) -> None:
    """The whole file or none: a reader sees the old one, the new one or nothing."""
    with atomic_text(path) as handle:
        handle.write(text)


def now_utc() -> str:
    """UTC now, ISO 8601 with seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
