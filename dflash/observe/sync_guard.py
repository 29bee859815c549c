"""Scopes that the workers enter, so that every host sync is counted, logged or refused where it happens.

    with scopes.enter("drafter/0", device):
        worker.run()                       # calls mark_step(index) at each step

`NO_SCOPES` is what a run has by default and costs one call per worker. `GuardScopes` is `dflash train --sync-guard`;
`CountingScopes` is what the harness counts with. A sync on purpose is declared: `with allowed_sync("checkpoint"):`.
What the modes see and where they draw the line between host and device: `sync_modes`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Literal, Protocol

from dflash.device import Device
from dflash.observe import sync_calls
from dflash.observe.sync_boundary import SIMULATED, Boundary
from dflash.observe.sync_modes import modes
from dflash.observe.sync_scope import (
    WORK,
    Key,
    Ledger,
    Place,
    Scope,
    SyncNotAllowed,
    allowed_sync,
    current_scope,
    entered,
    mark_step,
)

__all__ = [
    "NO_SCOPES",
    "CountingScopes",
    "GuardScopes",
    "NoScopes",
    "Scopes",
    "SyncNotAllowed",
    "allowed_sync",
    "current_scope",
    "mark_step",
]

_log = logging.getLogger(__name__)


class Scopes(Protocol):
    """What a run hands to its workers."""

    def enter(self, role: str, device: Device | None = None) -> AbstractContextManager[object]:
        """Around a worker's whole loop, in its own thread. `device` None: the worker has no device (prefetcher, monitor)."""
        ...


class NoScopes:
    """Counts nothing."""

    def enter(self, role: str, device: Device | None = None) -> AbstractContextManager[object]:
        return contextlib.nullcontext()


NO_SCOPES = NoScopes()


@contextlib.contextmanager
def watched(scope: Scope, device: Device | None, *, cuda: bool, strict: bool = True) -> Iterator[Scope]:
    """Everything that a counted worker runs under. On the CPU its device is named `cpu:0` meanwhile (see `sync_modes`)."""
    boundary = Boundary(cuda=cuda, strict=strict)
    named = device.torch if device is not None else None
    scope.simulated = strict and not cuda
    sync_calls.install()
    try:
        if device is not None and not cuda:
            device.torch = SIMULATED
        with entered(scope), modes(scope, boundary):
            yield scope
    finally:
        if device is not None and named is not None:
            device.torch = named
        sync_calls.uninstall()


class CountingScopes:
    """Counts per role, step, kind and place. Nothing is counted until `arm()`.

    Args:
        work: also count operations, allocations and copies.
        cuda: where tensors live; None: by the device of each scope, or, for scopes without one, whether any is CUDA.
    """

    def __init__(self, *, work: bool = True, by_step: bool = True, cuda: bool | None = None) -> None:
        self.ledger = Ledger(work=work, by_step=by_step)
        self._cuda = cuda
        self.entered: dict[str, Scope] = {}
        """Every role that ever entered, with its last scope: a role that is missing here was not counted."""

    def enter(self, role: str, device: Device | None = None) -> AbstractContextManager[Scope]:
        cuda = self._cuda
        if cuda is None:
            cuda = device.is_cuda if device is not None else _any_cuda()
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
            first, last: only steps first <= step < last, of workers that mark their steps; others (-1) always count.
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


def _any_cuda() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.is_initialized()


class GuardScopes:
    """`dflash train --sync-guard`: `log` tells each place once, `disallow` raises `SyncNotAllowed` in the worker.

    A worker with a device is watched from its second step on: the first warms caches up, and may wait. The prefetcher and the
    monitor are watched from the start.
    """

    def __init__(self, mode: Literal["log", "disallow"], warmup_steps: int = 1) -> None:
        self.mode = mode
        self.ledger = Ledger(armed=True, work=False, by_step=False, on_sync=self._on_sync)
        self._warmup = warmup_steps
        self._lock = threading.Lock()
        self._told: set[tuple[str, str, Place]] = set()

    def enter(self, role: str, device: Device | None = None) -> AbstractContextManager[Scope]:
        cuda = device.is_cuda if device is not None else _any_cuda()
        warmup = self._warmup if device is not None else _NONE
        return watched(_Warming(role, device is not None, self.ledger, warmup), device, cuda=cuda)

    def _on_sync(self, key: Key) -> None:
        if self.mode == "disallow":
            raise SyncNotAllowed(
                f"{key.role} waits for its device: {key.kind} at {key.place}; remove it, or declare it: with allowed_sync('why'):"
            )
        with self._lock:
            name = (key.role, key.kind, key.place)
            if name in self._told:
                return
            self._told.add(name)
        _log.warning("sync guard: %s waits for its device: %s at %s", key.role, key.kind, key.place)

    def summary(self) -> list[str]:
        """One line for each place, the most frequent first, then the declared ones."""
        found = sorted(summed(self.ledger.counts.copy()).items(), key=lambda item: -item[1])
        lines = [f"{role}: {n} x {kind} at {place}" for (role, kind, place), n in found]
        declared: dict[tuple[str, str], int] = {}
        for (key, reason), n in self.ledger.declared.copy().items():
            declared[key.role, reason] = declared.get((key.role, reason), 0) + n
        return lines + [f"{role}: {n} declared: {reason}" for (role, reason), n in declared.items()]


_NONE = -1


class _Warming(Scope):
    """A scope that records nothing during its first steps."""

    __slots__ = ("_warmup",)

    def __init__(self, role: str, on_device: bool, ledger: Ledger, warmup: int) -> None:
        super().__init__(role, on_device, ledger)
        self._warmup = warmup

    def record(self, kind: str, amount: int = 1, place: Place | None = None) -> None:
        if kind not in WORK and self.steps_seen > self._warmup:
            super().record(kind, amount, place)
