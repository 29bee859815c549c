"""Runs Python in a process of its own, for so long and no longer: what it started ends with it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from steptime.run_files import child_environment

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 5.0
"""For those that were told to end."""


@dataclass(frozen=True)
class Ended:
    """A child that has ended.

    Attributes:
        code: its exit code; None: it took too long and was killed.
    """

    code: int | None
    out: str
    err: str
    seconds: float

    @property
    def last_line(self) -> str:
        """Of its complaints: what a failure is told by."""
        lines = [line for line in self.err.splitlines() if line.strip()]
        return lines[-1].strip() if lines else "no message"


def run_python(
    arguments: Sequence[str],
    *,
    limit_s: float,
    root: Path = ROOT,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """`python ARGUMENTS` in a tree of the repository, whose own code it imports.

    Past the limit, and on Ctrl-C, it is killed with every process below it. Its output goes through files: a
    pipe that a grandchild keeps open would be waited for.

    Args:
        environment: on top of this process' own.
    """
    return run(
        [sys.executable, *arguments],
        limit_s=limit_s,
        folder=root,
        environment={"PYTHONPATH": str(root), **(environment or {})},
    )


def run(
    words: Sequence[str], *, limit_s: float, folder: Path, environment: Mapping[str, str] | None = None
) -> Ended:
    """The same for any program.

    Raises:
        OSError: there is no such program.
    """
    began = time.monotonic()
    with _scratch() as out, _scratch() as err:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env={**child_environment(), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
        code: int | None = None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                kill_tree(process.pid)
                process.wait()
        return Ended(code, _read(out), _read(err), time.monotonic() - began)


def _scratch() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def kill_tree(pid: int) -> None:
    """Kill a process and all below it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        family = [root]
        with contextlib.suppress(psutil.Error):
            root.suspend()  # it starts no more of them
            family += root.children(recursive=True)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs([one for one in family if one.pid != os.getpid()], timeout=PATIENCE_S)
