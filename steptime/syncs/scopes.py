"""Whose work a thread does, and the ledger that it is written in.

A scope belongs to one worker: its role ("target/0", "drafter/1", "prefetcher", "monitor"), its device, its
step. The scope travels with the modes (`modes`), and autograd's own threads inherit those, so backward is
charged to the worker that called it. Nothing here is imported by a run without a guard except `allowed_sync`
and `mark_step`."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import CodeType, TracebackType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

OPERATION = "operation"
ALLOCATION = "allocation"
COPY_TO_DEVICE, COPY_TO_HOST = "copy to device", "copy to host"
BYTES_TO_DEVICE, BYTES_TO_HOST = "bytes to device", "bytes to host"
WORK = frozenset({OPERATION, ALLOCATION, COPY_TO_DEVICE, COPY_TO_HOST, BYTES_TO_DEVICE, BYTES_TO_HOST})
"""Kinds that count device work; every other kind is a host sync."""


GRAPH = "compiled graph: "
"""How the function of a place begins that is a whole compiled graph."""
DEVICE, EVENT = "device synchronize", "event synchronize"


class Place(NamedTuple):
    """The innermost frame outside torch and the counters themselves."""

    file: str
    line: int
    function: str

    @property
    def where(self) -> str:
        """file:line, the file below the repository or site-packages."""
        return f"{_short(self.file)}:{self.line}"

    def __str__(self) -> str:
        return f"{self.where} {self.function}"


class Key(NamedTuple):
    """What a count is kept by. `step` is the worker's own (`mark_step`), -1 before its first."""

    role: str
    step: int
    kind: str
    place: Place


class SyncNotAllowed(RuntimeError):
    """A host sync under `--sync-guard disallow`, outside `allowed_sync`."""


@dataclass
class Ledger:
    """Counts of one `Scopes` object. Keys hold the role, and a role has one writer, so no lock.

    Attributes:
        armed: the switch; read before anything is written, thrown from any thread.
        work: also count device work (operations, copies, allocations), not only syncs.
        counts, declared: number of events by key; `declared` those inside `allowed_sync`, by key and reason.
        on_sync: called for an undeclared sync after it is counted; may raise.
    """

    armed: bool = False
    work: bool = True
    by_step: bool = True
    counts: dict[Key, int] = field(default_factory=dict)
    declared: dict[tuple[Key, str], int] = field(default_factory=dict)
    on_sync: Callable[[Key], None] | None = None
    asked: dict[tuple[str, str, Place], dict[Place, int]] | None = None
    """Where the user's own code asked for a wait, by role, kind and place; None: not kept."""


@dataclass(slots=True)
class Region:
    """A call of a compiled function that is under way (see `compiled`).

    Attributes:
        code: what torch keeps its compiled forms by.
        graphs, operators: graphs of it that ran, and operators that ran outside of them.
        compiles: kinds of the compiles that it took.
    """

    name: str
    code: CodeType | None
    graphs: int = 0
    operators: int = 0
    compiles: list[str] = field(default_factory=list)


class Scope:
    """One worker inside its loop. Attributes other than role and device are the modes' notes to themselves.

    Attributes:
        on_device: the worker works on a device: what it makes there counts as device work.
        reason: why syncs are allowed just now, or None.
        quiet: above 0 while an operation that was counted as a whole runs.
        label: what the user wrote for the scalar read that comes next.
        placing: where the next outputs live ("host", "device"), or None: follow the inputs.
        free_value: the value being assigned is a Python number, which needs no copy.
        simulated: its device is a part of the CPU that goes by the name of `cpu:0`.
        warmup: syncs of so many first steps are not counted; -1: all are, also those before the first step.
        unfused: compiled functions run as single operators here, whole and under both modes.
        function_mode: to be entered again where PyTorch leaves it (around backward).
        region: the compiled function that runs, or None.
        graph: where the compiled graph is called that runs, or None: only waits count inside, at this place.
    """

    __slots__ = (
        "free_value",
        "function_mode",
        "graph",
        "label",
        "ledger",
        "on_device",
        "placing",
        "quiet",
        "reason",
        "region",
        "role",
        "simulated",
        "step",
        "steps_seen",
        "unfused",
        "warmup",
    )

    def __init__(self, role: str, on_device: bool, ledger: Ledger, warmup: int = -1) -> None:
        self.role, self.on_device, self.ledger, self.warmup = role, on_device, ledger, warmup
        self.step = -1
        self.steps_seen = 0
        self.reason: str | None = None
        self.quiet = 0
        self.label: str | None = None
        self.placing: str | None = None
        self.free_value = False
        self.simulated = self.unfused = False
        self.function_mode: AbstractContextManager[object] | None = None
        self.region: Region | None = None
        self.graph: Place | None = None

    def mark_step(self, index: int) -> None:
        """The worker begins step (or batch) `index`."""
        self.step = index
        self.steps_seen += 1

    def record(self, kind: str, amount: int = 1, place: Place | None = None) -> None:
        """Count `amount` of `kind` at the caller's place in the code."""
        ledger = self.ledger
        if self.quiet or not ledger.armed:
            return
        is_work = kind in WORK
        if is_work and self.graph is not None:
            return
        if not ledger.work if is_work else self.steps_seen <= self.warmup:
            return
        key = Key(
            self.role, self.step if ledger.by_step else -1, kind, place or self.graph or calling_place()
        )
        if self.reason is not None:
            declared = (key, self.reason)
            ledger.declared[declared] = ledger.declared.get(declared, 0) + amount
            return
        ledger.counts[key] = ledger.counts.get(key, 0) + amount
        if ledger.asked is not None and not is_work:
            asker = asking_place()
            askers = ledger.asked.setdefault((key.role, kind, key.place), {})
            askers[asker] = askers.get(asker, 0) + amount
        if not is_work and ledger.on_sync is not None:
            ledger.on_sync(key)


class _Here(threading.local):
    scope: Scope | None = None


_here = _Here()
_open_scopes = 0
_open_lock = threading.Lock()


@contextlib.contextmanager
def entered(scope: Scope) -> Iterator[Scope]:
    """Make it the thread's scope."""
    global _open_scopes
    with _open_lock:
        _open_scopes += 1
    outer, _here.scope = _here.scope, scope
    try:
        yield scope
    finally:
        _here.scope = outer
        with _open_lock:
            _open_scopes -= 1


def current_scope() -> Scope | None:
    """The calling thread's scope; in autograd's threads the one of the worker that called backward."""
    if not _open_scopes:
        return None
    if _here.scope is not None:
        return _here.scope
    for mode in reversed(_get_current_dispatch_mode_stack()):
        scope = getattr(mode, "sync_scope", None)
        if isinstance(scope, Scope):
            return scope
    return None


def mark_step(index: int) -> None:
    """Called by a worker at the start of each step, so that counts of two runs are compared step by step.

    Costs one global read when nothing is counted.
    """
    if _open_scopes:
        scope = current_scope()
        if scope is not None:
            scope.mark_step(index)


def note_wait(kind: str) -> None:
    """The caller's own device object waits for its work: `DEVICE` or `EVENT`.

    For classes that stand for a device on a machine without one. Costs one global read when nothing is
    counted."""
    if _open_scopes:
        scope = current_scope()
        if scope is not None:
            scope.record(kind, place=calling_place(3))


class allowed_sync:
    """Declare a host sync on purpose; a guard lets it pass, a counter counts it apart under `reason`."""

    __slots__ = ("_outer", "_reason", "_scope")

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self._scope: Scope | None = None

    def __enter__(self) -> None:
        if _open_scopes:
            scope = self._scope = current_scope()
            if scope is not None:
                self._outer, scope.reason = scope.reason, self._reason

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._scope is not None:
            self._scope.reason = self._outer
            self._scope = None


_TORCH = os.path.dirname(torch.__file__) + os.sep
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_skipped_folders = [_TORCH, os.path.join(_ROOT, "steptime") + os.sep]
_SKIPPED_FILES = {
    contextlib.__file__,
    functools.__file__,
    threading.__file__,
    logging.__file__,
}
_skips: dict[str, bool] = {}
_STDLIB = os.path.dirname(os.__file__) + os.sep


def leave_out(folder: str) -> None:
    """Files below `folder` count for others: none of their lines is ever the place of a sync."""
    _skipped_folders.append(os.path.join(folder, ""))
    _skips.clear()


def calling_place(depth: int = 1) -> Place:
    """The innermost frame that is the program's own; in a thread of autograd without one, the node that runs.

    Args:
        depth: frames to leave out: 1 is the caller, 2 its caller.
    """
    frame = sys._getframe(depth)
    while frame is not None:
        name = frame.f_code.co_filename
        skip = _skips.get(name)
        if skip is None:
            skip = _skips[name] = name in _SKIPPED_FILES or name.startswith(("<frozen", *_skipped_folders))
        if not skip:
            return Place(name, frame.f_lineno, frame.f_code.co_qualname)
        frame = frame.f_back  # type: ignore[assignment]
    node = torch._C._current_autograd_node()
    return Place("autograd", 0, node.name() if node is not None else "?")


def asking_place() -> Place:
    """The innermost frame of the user's own tree: no installed package, none of Python's or of the harness'
    files. Where the stack has none (a backward, a thread of a library), the calling place."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if _is_own(name):
            return Place(name, frame.f_lineno, frame.f_code.co_qualname)
        frame = frame.f_back  # type: ignore[assignment]
    return calling_place(2)


@functools.cache
def _is_own(file: str) -> bool:
    foreign = ("<", _STDLIB, *_skipped_folders)
    return not (file.startswith(foreign) or "site-packages" + os.sep in file or "torchinductor" in file)


def _short(file: str) -> str:
    """Below the repository, the current folder or site-packages when it is there."""
    for folder in (_ROOT, os.getcwd()):
        if "site-packages" not in file and file.startswith(folder + os.sep):
            return file[len(folder) + 1 :]
    return file.rpartition("site-packages" + os.sep)[2]


@contextlib.contextmanager
def noting(notes_of: object, **notes: Any) -> Iterator[None]:
    """Set some attributes of a scope (or of a simulated host) for what is called inside."""
    outer = {name: getattr(notes_of, name) for name in notes}
    for name, value in notes.items():
        setattr(notes_of, name, value)
    try:
        yield
    finally:
        for name, value in outer.items():
            setattr(notes_of, name, value)
