"""Files written whole or not at all, and progress that speaks up only when work takes long."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from steptime.errors import UserError


def sync(file: IO) -> None:
    """Push a file's bytes to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Push a folder's entries to the disk, so that a rename in it survives a power cut."""
    with contextlib.suppress(OSError):  # not every file system lets a folder be opened
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def atomic_text(path: Path) -> Iterator[IO[str]]:
    """A text file that appears under `path` only when the block ends well.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    except OSError as error:
        raise UserError(f"{path}: cannot write: {error.strerror}") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            yield file
            sync(file)
        Path(name).chmod(
            0o644
        )  # mkstemp's 0600 would hide the result from the other users of a shared folder
        os.replace(name, path)
        sync_folder(path.parent)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `path` when the block ends well; an equal folder made meanwhile
    wins.

    Raises:
        UserError: the parent folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    except OSError as error:
        raise UserError(f"{path.parent}: cannot write: {error.strerror}") from None
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                with file.open("rb") as stream:
                    os.fsync(stream.fileno())
        temporary.chmod(0o755)
        try:
            temporary.rename(path)
        except OSError:
            if not path.is_dir():  # another process was faster: its folder has the same content
                raise
        sync_folder(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class Progress:
    """`with Progress("Tokenising", total) as progress: progress.advance(n)`: silent until two seconds have
    passed.

    On a terminal a bar of rich; elsewhere (CI logs) a plain line on stderr every ten seconds.
    """

    quiet_s = 2.0
    plain_every_s = 10.0

    def __init__(self, what: str, total: int | None = None, unit: str = "") -> None:
        self.what = what
        self.total = total
        self.unit = f" {unit}" if unit else ""
        self.done = 0
        self._start = time.monotonic()
        self._next = self._start + self.quiet_s
        self._bar: object = None
        self._task: object = None

    def __enter__(self) -> Progress:
        return self

    def advance(self, count: int = 1) -> None:
        """Count `count` more as done; draws at most a few times a second."""
        self.done += count
        now = time.monotonic()
        if now < self._next:
            return
        if sys.stderr.isatty():
            self._next = now + 0.2
            self._draw()
        else:
            self._next = now + self.plain_every_s
            print(self._line(now), file=sys.stderr, flush=True)

    def _line(self, now: float) -> str:
        seconds = now - self._start
        if not self.total:
            return f"{self.what}: {self.done:,}{self.unit} in {seconds:.0f} s"
        left = seconds * (self.total - self.done) / max(self.done, 1)
        return (
            f"{self.what}: {self.done:,} of {self.total:,}{self.unit}, {seconds:.0f} s, about {left:.0f} s "
            "left"
        )

    def _draw(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bar

        if self._bar is None:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self.what, total=self.total)
        assert isinstance(self._bar, Bar)
        self._bar.update(self._task, completed=self.done)  # type: ignore[arg-type]

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()  # type: ignore[attr-defined]
