"""Which core a thread runs on, where that would differ between two processes and not change within one.

The scheduler leaves a busy thread where it is, so the two processes of a gate may run their drafters on
different cores for all their life. Cores of a shared machine are not equally fast, so a launch that differs
in this alone is slower or faster for good."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager


def usable() -> list[int]:
    """Cores that this thread may use, in order; empty where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@contextlib.contextmanager
def kept_on(core: int | None) -> Iterator[None]:
    """The calling thread stays on `core`; None: wherever the system puts it."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class OwnCores:
    """`Scopes` of the trainer that keep each worker on a core of its own, in every process the same one.

    Args:
        roles: of the workers; empty, or more than there are cores: the system places them.
    """

    def __init__(self, roles: Sequence[str]) -> None:
        cores = usable()
        self.cores = dict(zip(roles, cores, strict=False)) if len(roles) <= len(cores) else {}

    def enter(self, role: str, device: object = None) -> AbstractContextManager[object]:
        """Around a worker's loop, in its own thread."""
        return kept_on(self.cores.get(role))
