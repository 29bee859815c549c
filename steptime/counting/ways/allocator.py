"""Way: counters of the caching allocators, read around every operation.

The device's allocator asks the driver for memory when its cache has none that fits, and gives memory back
when it runs out or is told to; both stall the device, and no synchronisation call tells of either. The host's
allocator pins memory likewise.

Whether a cache has memory that fits depends on what the other threads have freed by then, so these numbers
differ between two runs of one program. They are told, with their places, and gate nothing."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from steptime.counting.difference import Counts
from steptime.counting.ways.way import Notes, carried, required
from steptime.syncs.dispatch import WatchingMode
from steptime.syncs.scopes import Scope

DEVICE_KEYS = {
    "num_device_alloc": "device malloc",
    "num_device_free": "device free",
    "num_sync_all_streams": "allocator waits for all streams",
    "num_alloc_retries": "allocator retry",
}
TURN_S = 60.0
HOST_KEYS = {"num_host_alloc": "pinned malloc", "num_host_free": "pinned free"}


def rises(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """How much each known counter rose, by kind."""
    kinds = {**DEVICE_KEYS, **HOST_KEYS}
    rose = {kind: after.get(key, 0) - before.get(key, 0) for key, kind in kinds.items()}
    return {kind: amount for kind, amount in rose.items() if amount > 0}


def read(device: int) -> dict[str, int]:
    """Counters of one CUDA device, and of the pinned memory. Some tens of microseconds: torch makes a tree of
    all its statistics."""
    statistics = torch.cuda.memory_stats_as_nested_dict(device)
    total = {key: statistics[key] for key in DEVICE_KEYS if key in statistics}
    host: Mapping[str, int] = getattr(torch.cuda, "host_memory_stats", dict)()
    for key in HOST_KEYS:
        if key in host:
            total[key] = host[key]
    return total


class AllocatorWay:
    """Reads the counters of the thread's device before and after each operation of an armed thread.

    The counters are the device's and not the thread's, so armed threads take turns: what rises between two
    readings is the work of the thread that reads. Only in a process made for counting."""

    name = "allocator counters"
    sees = (
        "device memory asked of the driver and given back, waits for all streams, pinned memory; with the "
        "operation's place"
    )
    does_not_see = (
        "any other wait; memory of a device that is not the thread's own; what compiled code allocates"
    )
    every_step = False
    claims = frozenset({"empty_cache", "device_alloc"})
    device = "cuda"

    def __init__(self) -> None:
        self.notes = Notes()
        self._lock = threading.Lock()
        self._users = 0
        self._turn = threading.RLock()

    def available(self) -> str | None:
        return None if torch.cuda.is_available() else "no CUDA device, hence no allocator counters"

    def arm(self, role: str) -> AbstractContextManager[object]:
        return self._armed(role)

    @contextlib.contextmanager
    def _armed(self, role: str) -> Iterator[Scope]:
        required(self)
        with carried(role) as scope, self.watching():
            yield scope

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around an armed thread's loop; the thread must be in a scope already."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._empty_cache = torch.cuda.empty_cache
                torch.cuda.empty_cache = self._around(torch.cuda.empty_cache)
        try:
            with _Reading(self):
                yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    torch.cuda.empty_cache = self._empty_cache

    def _around(self, original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.during(lambda: original(*args, **kwargs))

        return call

    def during(self, operation: Callable[[], Any]) -> Any:
        """Run it in turn with the other armed threads, and count what rises meanwhile at the caller's place.

        Raises:
            RuntimeError: another thread's operation has not ended for a minute.
        """
        if not self._turn.acquire(timeout=TURN_S):
            raise RuntimeError(
                f"{self.name}: another thread's operation has not ended for {TURN_S:g} s; the two may "
                "wait for each other"
            )
        try:
            device = torch.cuda.current_device()
            before = read(device)
            try:
                return operation()
            finally:
                for kind, amount in rises(before, read(device)).items():
                    self.notes.note(kind, amount)
        finally:
            self._turn.release()

    def counts(self) -> Counts:
        return self.notes.summed()


class _Reading(WatchingMode):
    def __init__(self, way: AllocatorWay) -> None:
        super().__init__()
        self._way = way

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._way.during(lambda: func(*args, **(kwargs or {})))
