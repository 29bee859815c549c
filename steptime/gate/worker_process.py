"""The parent's end of a gate worker: starts it, gives it turns, and says in one line what became of it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from steptime.gate.worker import PROTOCOL
from steptime.gate.worktrees import Tree
from steptime.machine.commit import search_path
from steptime.records.pairs import Layer, Request, Segment

BUILD_S = 600.0
TURN_S = 120.0
CLOSE_S = 5.0
LAST_LINES = 40
"""Of a lost worker's stderr, shown on ours: its traceback."""


class WorkerLost(Exception):
    """A worker died, hung or spoke nonsense; the message says which and why."""


class WorkerProcess:
    """One worker process of one tree.

    Args:
        order: the first message, see `worker`.
    """

    def __init__(self, tree: Tree, order: Mapping[str, Any]) -> None:
        self.tree = tree
        self.groups = 0
        self.switches: tuple[str, ...] = ()
        self.periods: dict[Layer, float] = {}
        self.versions: dict[str, str] = {}
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        environment = dict(os.environ, PYTHONPATH=search_path(tree.root), PYTHONUNBUFFERED="1")
        try:
            self._process = subprocess.Popen(
                [tree.python, "-m", tree.worker],
                cwd=tree.root,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
        except OSError as error:
            self._errors.close()
            raise WorkerLost(f"{tree.name} cannot be started with {tree.python}: {error.strerror}") from None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()
        self._send(order)

    def greet(self) -> None:
        """Wait until it is built. Raises WorkerLost, also when it speaks another protocol or runs another
        tree's code."""
        with self._understood():
            hello = self._receive(BUILD_S)["hello"]
            self._check(hello)
            self.groups = int(hello["groups"])
            self.switches = tuple(hello["switches"])
            self.periods = {Layer(name): float(seconds) for name, seconds in hello["periods"].items()}
            self.versions = dict(hello.get("versions", {}))

    def _check(self, hello: Mapping[str, Any]) -> None:
        if hello["protocol"] != PROTOCOL:
            raise WorkerLost(
                f"{self.tree.name} speaks gate protocol {hello['protocol']}, this harness {PROTOCOL}: not "
                "comparable"
            )
        if Path(hello["root"]).resolve() != self.tree.root.resolve():
            raise WorkerLost(
                f"{self.tree.name} ran the code in {hello['root']}, not that in {self.tree.root}"
            )

    def turn(self, request: Request) -> Segment:
        """Let it run one segment with all its switches on, and stand still again. Raises WorkerLost."""
        self._send(
            {
                "on": list(self.switches),
                "steps": request.steps,
                "group": request.group,
                "layer": request.layer,
                "pair": request.pair,
                "half": request.half,
            }
        )
        with self._understood():
            fields = dict(self._receive(BUILD_S if request.pair < 0 else TURN_S)["segment"])
            return Segment(
                **{**fields, "on": tuple(request.on), "step_seconds": tuple(fields["step_seconds"])}
            )

    def finish(self) -> dict[str, Any]:
        """End the run; its result. Raises WorkerLost."""
        self._send({"stop": True})
        with self._understood():
            return dict(self._receive(TURN_S)["result"])

    def trace(self) -> list[tuple[int, float, float]]:
        """The answer of a worker that was asked for a trace. Raises WorkerLost."""
        with self._understood():
            return [
                (int(step), float(loss), float(norm)) for step, loss, norm in self._receive(BUILD_S)["trace"]
            ]

    def close(self) -> None:
        """Make sure that it is gone; may be called at any time."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        # One that still builds does not read: it is told to clean up after itself before it is killed.
        for end in (lambda: None, self._process.terminate, self._process.kill):
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_S)
                break
        self._reader.join(CLOSE_S)
        self._errors.close()

    @contextlib.contextmanager
    def _understood(self) -> Iterator[None]:
        """What a worker of another commit says need not be what this one expects. Raises WorkerLost for
        it."""
        try:
            yield
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            text = f"{type(error).__name__}: {error}"
            raise WorkerLost(
                f"{self.tree.name} sent a message that this harness does not understand: {text}"
            ) from None

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `_receive` tells why it is gone
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise WorkerLost(f"{self.tree.name} gave no answer within {timeout_s:g} s") from None
        if not line:
            code = self._process.wait()
            why = self._unknown_keys() or f"crashed (exit code {code}): {self._last_words()}"
            raise WorkerLost(f"{self.tree.name} {why}")
        try:
            message: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            raise WorkerLost(f"{self.tree.name} wrote {line[:60]!r} instead of a message") from None
        if "error" in message:
            text = str(message["error"])
            raise WorkerLost(f"{self.tree.name} {'' if text.startswith('does not ') else 'refused: '}{text}")
        return message

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put(line)
        self._lines.put("")

    def _unknown_keys(self) -> str:
        """Of a worker of an older commit, which ends with pydantic's traceback: the settings that it does not
        know; empty when that is not why it ended."""
        self._errors.seek(0)
        lines = self._errors.read().splitlines()
        keys = [key for key, why in pairwise(lines) if why.startswith("  Extra inputs are not permitted")]
        return "; ".join(f"does not know `{key}`" for key in keys)

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = [line.rstrip() for line in self._errors.read().splitlines() if line.strip()]
        if len(lines) > 1:
            print(f"--- stderr of {self.tree.name}", *lines[-LAST_LINES:], "---", sep="\n", file=sys.stderr)
        return lines[-1].strip() if lines else "no message"
