"""`dflash train --sync-guard log|disallow`: every host sync of a worker's step is told, or ends the run."""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager
from typing import Literal

from dflash.device import Device
from steptime.host_memory import keep_marks
from steptime.syncs.counting import any_cuda, summed, watched
from steptime.syncs.scopes import Key, Ledger, Place, Scope, SyncNotAllowed

_log = logging.getLogger(__name__)


class GuardScopes:
    """`dflash train --sync-guard`: `log` tells each place once, `disallow` raises `SyncNotAllowed` in the
    worker.

    A worker with a device is watched from its second step on: the first warms caches up, and may wait. The
    prefetcher and the monitor are watched from the start."""

    def __init__(self, mode: Literal["log", "disallow"], warmup_steps: int = 1) -> None:
        keep_marks()  # the workers may be CPU ones, on a machine with CUDA too
        self.mode = mode
        self.ledger = Ledger(armed=True, work=False, by_step=False, on_sync=self._on_sync)
        self._warmup = warmup_steps
        self._lock = threading.Lock()
        self._told: set[tuple[str, str, Place]] = set()

    def enter(self, role: str, device: Device | None = None) -> AbstractContextManager[Scope]:
        cuda = device.is_cuda if device is not None else any_cuda()
        warmup = self._warmup if device is not None else -1
        return watched(Scope(role, device is not None, self.ledger, warmup), device, cuda=cuda)

    def _on_sync(self, key: Key) -> None:
        if self.mode == "disallow":
            raise SyncNotAllowed(
                f"{key.role} waits for its device: {key.kind} at {key.place}; remove it, or declare it: with "
                "allowed_sync('why'):"
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
