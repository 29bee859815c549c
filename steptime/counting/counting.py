"""Exact counts in a process of their own, untimed, while the timed process builds its subject.

Counting slows every operation down, so it never runs beside a measurement: `wait` returns before the first
segment is taken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from steptime.machine.commit import ROOT, search_path
from steptime.progress import Reporter, human_time
from steptime.records.types import ExactCounts

LIMIT_S = 600.0
LAST_LINES = 40
"""Of its stderr, shown on ours when it fails: its traceback."""
COUNTS = TypeAdapter(dict[str, ExactCounts])

Arms = Mapping[str, Collection[str]]
"""What is counted: a name, and what is on. "off", with nothing on, is among them."""


class Pending(Protocol):
    """Counting under way."""

    def wait(self, reporter: Reporter) -> None:
        """Return when it has ended, well or not."""

    def result(self) -> tuple[Mapping[str, ExactCounts], Sequence[str]]:
        """Counts by arm, and what went wrong, one line each."""

    def close(self) -> None:
        """End the process if it still runs; may be called at any time."""


class Counter(Protocol):
    """Starts counting."""

    def start(self, arms: Arms) -> Pending: ...


class ProcessCounter:
    """Runs the counting process for one config.

    Args:
        config: settings of the subject, as its `counted_as` gives them.
        subject: whose settings they are.
        module: the process; `bench.counting` is the one that trees of every age have.
        plants: names of planted collectors.
        root: the tree whose code is counted; its `bench` and `dflash` are the ones imported.
        all_collectors: the arm `all` means all that the tree has, whatever the arm says.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        subject: str = "trainer",
        module: str = "bench.counting",
        plants: Sequence[str] = (),
        root: Path = ROOT,
        python: str = sys.executable,
        all_collectors: bool = False,
    ) -> None:
        self._config, self._plants, self._root, self._python = config, plants, root, python
        self._subject, self._module, self._all_collectors = subject, module, all_collectors

    def start(self, arms: Arms) -> ProcessPending:
        request = {
            "subject": self._subject,
            "config": dict(self._config),
            "plants": list(self._plants),
            "arms": {name: sorted(on) for name, on in arms.items()},
            "all_collectors": self._all_collectors,
        }
        return ProcessPending(request, self._root, self._python, self._module)


class ProcessPending:
    """One child process; its answer comes through a file, its complaints through stderr."""

    def __init__(self, request: Mapping[str, Any], root: Path, python: str, module: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dflash-counts-")
        self._answer = Path(self._folder.name) / "counts.json"
        self._errors = open(Path(self._folder.name) / "stderr", "w+", encoding="utf-8")  # noqa: SIM115
        self._started = time.monotonic()
        self._found: tuple[Mapping[str, ExactCounts], Sequence[str]] | None = None
        self._closed = self._hung = False
        environment = dict(os.environ, PYTHONPATH=search_path(root))
        self._process = subprocess.Popen(
            [python, "-m", module, str(self._answer)],
            cwd=root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            text=True,
        )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request))
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # It died at once; `result` tells why.

    def wait(self, reporter: Reporter) -> None:
        if self._process.poll() is None:
            reporter.say(
                "counting syncs, operations, copies and allocations exactly, in a process of its own"
            )
        self._ended()
        took = human_time(time.monotonic() - self._started)
        counts, faults = self.result()
        reporter.say(
            f"exact counts of {len(counts)} arms in {took}"
            if not faults
            else f"exact counts failed: {faults[0]}"
        )

    def result(self) -> tuple[Mapping[str, ExactCounts], Sequence[str]]:
        if self._found is None:
            self._found = self._read()
        return self._found

    def _ended(self) -> bool:
        """Wait for it as long as it may take; whether it ended by itself."""
        try:
            self._process.wait(max(1.0, LIMIT_S - (time.monotonic() - self._started)))
        except subprocess.TimeoutExpired:
            self._hung = True
            self._process.kill()
            self._process.wait()
        return not self._hung

    def _read(self) -> tuple[Mapping[str, ExactCounts], Sequence[str]]:
        if not self._ended():
            return {}, (f"the counting process gave no counts within {LIMIT_S:g} s",)
        code = self._process.returncode
        self._errors.seek(0)
        lines = [line.rstrip() for line in self._errors.read().splitlines() if line.strip()]
        if code != 0:
            if len(lines) > 1 and not self._closed:
                print(
                    "--- stderr of the counting process",
                    *lines[-LAST_LINES:],
                    "---",
                    sep="\n",
                    file=sys.stderr,
                )
            return {}, (
                f"the counting process failed (exit code {code}): "
                f"{lines[-1].strip() if lines else 'no message'}",
            )
        try:
            return COUNTS.validate_json(self._answer.read_bytes()), ()
        except (OSError, ValidationError) as error:
            return {}, (f"the counting process left no counts: {str(error).splitlines()[0]}",)

    def close(self) -> None:
        if self._process.poll() is None:
            self._closed = True
            self._process.kill()
            self._process.wait()
        if self._found is None:
            self._found = self._read()
        self._errors.close()
        self._folder.cleanup()
