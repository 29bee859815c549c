"""Training scalars without a host sync: copied into a pinned ring, read steps later when their event has
fired."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from dflash.device import Device


class LateRow(NamedTuple):
    """Scalars of one step, arrived late.

    Attributes:
        values: float32 `[width]`, a copy of the ring's entry.
        tag: what the worker pushed with them, e.g. the plan indices of the step's batches.
    """

    step: int
    values: np.ndarray
    tag: Any


class LateScalars:
    """A ring of pinned rows. Owned by one worker thread, which pushes and polls.

    An entry is reused only after it has been read, so a row never tears; when the GPU is more than `depth`
    steps behind, the row is dropped and counted instead of waited for. Rows carry their step, by which the
    drafters' rows are joined (`scalars_log`).

    Attributes:
        dropped: rows that found no room.
    """

    def __init__(self, device: Device, width: int, depth: int) -> None:
        self._device = device
        self._rows = [device.pinned((width,), torch.float32) for _ in range(depth)]
        self._events = [device.event() for _ in range(depth)]
        self._steps = [0] * depth
        self._tags: list[Any] = [None] * depth
        self._head = 0
        self._tail = 0
        self.dropped = 0

    @property
    def pending(self) -> int:
        """Rows not yet read."""
        return self._head - self._tail

    def push(self, step: int, vector: torch.Tensor, tag: Any = None) -> None:
        """Enqueue a copy of `vector`, float32 `[width]` on the worker's device. Never waits."""
        depth = len(self._rows)
        if self._head - self._tail >= depth:
            self.dropped += 1
            return
        at = self._head % depth
        self._rows[at].copy_(vector, non_blocking=True)
        self._events[at].record(self._device.stream)
        self._steps[at] = step
        self._tags[at] = tag
        self._head += 1

    def poll(self) -> list[LateRow]:
        """The rows whose copy is complete, oldest first. Never waits."""
        rows: list[LateRow] = []
        depth = len(self._rows)
        while self._tail < self._head:
            at = self._tail % depth
            if not self._events[at].query():
                break
            rows.append(self._take(at))
        return rows

    def drain_blocking(self) -> list[LateRow]:
        """All pushed rows, after waiting for the device. Only at the end of a run, inside `allowed_sync`."""
        self._device.synchronize()  # sync: ok, the end of a run
        rows = []
        while self._tail < self._head:
            rows.append(self._take(self._tail % len(self._rows)))
        return rows

    def _take(self, at: int) -> LateRow:
        # A copy made by torch, so that a simulated device sees the host read the ring.
        values = self._rows[at].clone().numpy()  # sync: ok, host memory
        row = LateRow(self._steps[at], values, self._tags[at])
        self._tags[at] = None
        self._tail += 1
        return row
