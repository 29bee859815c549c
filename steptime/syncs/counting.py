"""What the harness counts with: scopes that count every host sync and all device work by role, step, kind and
place.

    scopes = CountingScopes()
    with scopes.enter("drafter/0", device):
        worker.run()                       # calls mark_step(index) at each step

What the modes see and where they draw the line between host and device: `modes`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from steptime.host_memory import keep_marks
from steptime.syncs import calls
from steptime.syncs.boundary import SIMULATED, Boundary
from steptime.syncs.modes import modes
from steptime.syncs.scopes import Key, Ledger, Place, Scope, current_scope, entered


class WorkerDevice(Protocol):
    """What is asked of a worker's device. `torch` is set to `SIMULATED` while a CPU device is counted."""

    torch: torch.device
    is_cuda: bool


class PlainDevice:
    """The device of that name, for a thread without a device object of its own."""

    def __init__(self, name: str) -> None:
        self.torch = torch.device(name)
        self.is_cuda = self.torch.type == "cuda"


@contextlib.contextmanager
def watched(
    scope: Scope,
    device: WorkerDevice | None,
    *,
    cuda: bool,
    strict: bool = True,
    boundary: Boundary | None = None,
    hooks: bool = True,
) -> Iterator[Scope]:
    """Everything that a counted worker runs under. On the CPU its device is named `cpu:0` meanwhile (see
    `modes`), or as a boundary of its own says.

    Args:
        hooks: wrap the entry points of `calls` meanwhile. A thread leaves that to who started it, whom
            it may outlive.
    """
    if getattr(device, "simulation", None) is not None:
        # A simulated device has modes of its own, which write their waits into the thread's scope.
        outer = current_scope()
        scope.simulated = True
        scope.function_mode = None if outer is None else outer.function_mode
        with entered(scope):
            yield scope
        return
    boundary = boundary or Boundary(cuda=cuda, strict=strict)
    named = device.torch if device is not None else None
    scope.simulated = boundary.modes() is not None or (boundary.strict and not boundary.cuda)
    if not cuda:
        keep_marks()
    if hooks:
        calls.install()
    try:
        if device is not None and not cuda:
            device.torch = SIMULATED
        with entered(scope), modes(scope, boundary):
            yield scope
    finally:
        if device is not None and named is not None:
            device.torch = named
        if hooks:
            calls.uninstall()


class CountingScopes:
    """Counts per role, step, kind and place. Nothing is counted until `arm()`.

    Args:
        work: also count operations, allocations and copies.
        cuda: where tensors live; None: by the device of each scope, or, for scopes without one, whether any
            is CUDA.
    """

    def __init__(self, *, work: bool = True, by_step: bool = True, cuda: bool | None = None) -> None:
        if cuda is not True:
            keep_marks()  # now: what the workers stage comes before they enter
        self.ledger = Ledger(work=work, by_step=by_step)
        self._cuda = cuda
        self.entered: dict[str, Scope] = {}
        """Every role that ever entered, with its last scope: a role that is missing here was not counted."""

    def enter(self, role: str, device: WorkerDevice | None = None) -> AbstractContextManager[Scope]:
        cuda = self._cuda
        if cuda is None:
            cuda = device.is_cuda if device is not None else any_cuda()
        scope = self.entered[role] = Scope(role, device is not None, self.ledger)
        return watched(scope, device, cuda=cuda)

    def arm(self) -> None:
        """Count from now on, in every thread."""
        self.ledger.armed = True

    def disarm(self) -> None:
        """Count no more."""
        self.ledger.armed = False

    def counts(self, first: int | None = None, last: int | None = None) -> dict[tuple[str, str, Place], int]:
        """Counts by (role, kind, place), undeclared ones only.

        Args:
            first, last: only steps first <= step < last, of workers that mark their steps; others (-1) always
                count.
        """
        return summed({key: n for key, n in self.ledger.counts.copy().items() if _within(key, first, last)})

    def declared(self) -> dict[tuple[str, str, Place, str], int]:
        """Counts inside `allowed_sync` by (role, kind, place, reason)."""
        total: dict[tuple[str, str, Place, str], int] = {}
        for (key, reason), n in self.ledger.declared.copy().items():
            name = (key.role, key.kind, key.place, reason)
            total[name] = total.get(name, 0) + n
        return total


def summed(counts: Mapping[Key, int]) -> dict[tuple[str, str, Place], int]:
    """Counts over all steps."""
    total: dict[tuple[str, str, Place], int] = {}
    for key, n in counts.items():
        name = (key.role, key.kind, key.place)
        total[name] = total.get(name, 0) + n
    return total


def _within(key: Key, first: int | None, last: int | None) -> bool:
    if key.step < 0:
        return True
    return (first is None or key.step >= first) and (last is None or key.step < last)


def any_cuda() -> bool:
    """Whether this process works with CUDA."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()
