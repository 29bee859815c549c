"""A run's folder: made, locked for one process, cleared of what a killed process left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from dflash.pipeline import checkpoint
from steptime.errors import UserError
from steptime.files import atomic_text

LOCK = "run.lock"
CHECKPOINTS = "checkpoints"
CONFIG = "config.json"


class RunFolder:
    """The folder of a run that this process holds.

    Attributes:
        leftovers: names of half-written checkpoints that were removed.
    """

    def __init__(self, path: Path, leftovers: list[str]) -> None:
        self.path, self.leftovers = path, leftovers

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    def write_config(self, text: str) -> None:
        """config.json, whole or not at all.

        Raises:
            UserError: the folder cannot be written.
        """
        try:
            with atomic_text(self.path / CONFIG) as file:
                file.write(text)
        except OSError as error:
            raise UserError(f"{self.path / CONFIG}: cannot write: {error.strerror}") from None


@contextlib.contextmanager
def hold(path: Path) -> Iterator[RunFolder]:
    """Make the folder if need be and hold it until the block ends; one left empty is removed again.

    The lock is the kernel's, on the file `run.lock`: a killed process holds nothing.

    Raises:
        UserError: the folder cannot be made or written, or another process holds it.
    """
    made = _make(path)
    try:
        with _locked(path):
            yield RunFolder(path, checkpoint.remove_leftovers(path / CHECKPOINTS))
    finally:
        for folder in made:
            with contextlib.suppress(OSError):  # not empty: it is a run's
                folder.rmdir()


def _make(path: Path) -> list[Path]:
    """The folders that had to be made, innermost first."""
    try:
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "a file is in the way" if isinstance(error, FileExistsError | NotADirectoryError) else None
        raise UserError(f"--out {path}: cannot be a run folder: {reason or error.strerror}") from None
    return missing


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = path / LOCK
    file = _take(path, lock)
    try:
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        file.flush()
    except OSError as error:
        file.close()
        raise UserError(f"--out {path}: cannot be a run folder: {error.strerror}") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.unlink()
        with contextlib.suppress(OSError):
            file.close()


def _take(path: Path, lock: Path) -> IO[str]:
    while True:
        try:
            file = lock.open("a+", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--out {path}: cannot be a run folder: {error.strerror}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = _holder(file.read())
            file.close()
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise UserError(f"--out {path}: {holder} trains there already; use another --out") from None
            raise UserError(f"{lock}: this file system has no locks ({error.strerror})") from None
        with contextlib.suppress(OSError):
            # Its holder may have removed the file between our opening and our lock.
            if os.path.samestat(os.fstat(file.fileno()), lock.stat()):
                return file
        file.close()


def _holder(text: str) -> str:
    try:
        held = json.loads(text)
        return f"process {held['pid']} on {held['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
