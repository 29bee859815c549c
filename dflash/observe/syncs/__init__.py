"""What a run says of its host syncs: the scopes its workers enter, and the syncs on purpose.

    with scopes.enter("drafter/0", device):
        worker.run()                       # calls mark_step(index) at each step

`NO_SCOPES` is what a run has by default and costs one call per worker. `GuardScopes` (in `guard`) is `dflash
train --sync-guard`; `steptime.syncs.counting.CountingScopes` is what the harness counts with. A sync on
purpose is declared: `with allowed_sync("checkpoint"):`."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Protocol

from dflash.device import Device
from steptime.syncs.scopes import allowed_sync, current_scope, mark_step

__all__ = ["NO_SCOPES", "NoScopes", "Scopes", "allowed_sync", "current_scope", "mark_step"]


class Scopes(Protocol):
    """What a run hands to its workers."""

    def enter(self, role: str, device: Device | None = None) -> AbstractContextManager[object]:
        """Around a worker's whole loop, in its own thread. `device` None: the worker has no device
        (prefetcher, monitor)."""
        ...


class NoScopes:
    """Counts nothing."""

    def enter(self, role: str, device: Device | None = None) -> AbstractContextManager[object]:
        return contextlib.nullcontext()


NO_SCOPES = NoScopes()
