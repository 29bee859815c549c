"""Which core a thread runs on, where that would differ between two processes and not change within one.

The scheduler leaves a busy thread where it is, so the two processes of a gate may run their drafters on different cores for all
their life. Cores of a shared machine are not equally fast, so a launch that differs in this alone is slower or faster for good.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash.config import Config
    from dflash.device import Device


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

    Only where all work on the CPU, each with one thread, and there is a core for each; otherwise the system places them.
    """

    def __init__(self, config: Config) -> None:
        from dflash.pipeline.build import threads_per_worker

        roles = [f"drafter/{index}" for index in range(len(config.drafter.devices))]
        roles += [f"target/{index}" for index in range(len(config.target.devices))]
        names = (*config.target.devices, *config.drafter.devices)
        cores = usable()
        fits = all(name.startswith("cpu") for name in names) and threads_per_worker(config) == 1 and len(roles) <= len(cores)
        self.cores = dict(zip(roles, cores, strict=False)) if fits else {}

    def enter(self, role: str, device: Device | None = None) -> AbstractContextManager[object]:
        """Around a worker's loop, in its own thread."""
        return kept_on(self.cores.get(role))
