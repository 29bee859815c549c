"""Way: counters of the caching allocators, read around every operation.

The device's allocator asks the driver for memory when its cache has none that fits, and gives memory back
when it runs out or is told to; both stall the device, and no synchronisation call tells of either. The host's
allocator pins memory likewise."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from bench.syncs.difference import Counts
from bench.syncs.ways.way import Notes, carried, required
from steptime.syncs.dispatch import WatchingMode
from steptime.syncs.scopes import Scope

DEVICE_KEYS = {
    "num_device_alloc": "device malloc",
    "num_device_free": "device free",
    "num_sync_all_streams": "allocator waits for all streams",
    "num_alloc_retries": "allocator retry",
}
HOST_KEYS = {"num_host_alloc": "pinned malloc", "num_host_free": "pinned free"}


def rises(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """How much each known counter rose, by kind."""
    kinds = {**DEVICE_KEYS, **HOST_KEYS}
    rose = {kind: after.get(key, 0) - before.get(key, 0) for key, kind in kinds.items()}
    return {kind: amount for kind, amount in rose.items() if amount > 0}


def read() -> dict[str, int]:
    """Counters of all devices that are in use, summed, and of the pinned memory."""
    total: dict[str, int] = {}
    for index in range(torch.cuda.device_count()):
        statistics = torch.cuda.memory_stats_as_nested_dict(index)
        for key in DEVICE_KEYS:
            if key in statistics:
                total[key] = total.get(key, 0) + statistics[key]
    host: Mapping[str, int] = getattr(torch.cuda, "host_memory_stats", dict)()
    for key in HOST_KEYS:
        if key in host:
            total[key] = host[key]
    return total


class AllocatorWay:
    """Reads the counters before and after each operation of an armed thread. A second thread that allocates
    in the same microseconds is charged to the first: the counters are the device's, not the thread's."""

    name = "allocator counters"
    sees = (
        "device memory asked of the driver and given back, waits for all streams, pinned memory; with the "
        "operation's place"
    )
    does_not_see = "any other wait; which of two threads it was, when both allocate at the same moment"
    every_step = False
    claims = frozenset({"empty_cache", "device_alloc"})
    device = "cuda"

    def __init__(self) -> None:
        self.notes = Notes()
        self._lock = threading.Lock()
        self._users = 0

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
            before = read()
            try:
                return original(*args, **kwargs)
            finally:
                self.note(before)

        return call

    def note(self, before: Mapping[str, int]) -> None:
        """Count what rose since `before`, at the caller's place."""
        for kind, amount in rises(before, read()).items():
            self.notes.note(kind, amount)

    def counts(self) -> Counts:
        return self.notes.summed()


class _Reading(WatchingMode):
    def __init__(self, way: AllocatorWay) -> None:
        super().__init__()
        self._way = way

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = read()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._way.note(before)
