"""Where each storage lives, what was done with it last, and when it is freed.

A tag belongs to a storage: a view is where its base is. What was never tagged is host memory; pinned or
pageable is what `steptime.host_memory` says."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING

import torch

from steptime.host_memory import PINNED, host_kind, storage_of
from steptime.simulate.races import History

if TYPE_CHECKING:
    from steptime.simulate.clocks import Clock
    from steptime.simulate.simulation import Simulation
    from steptime.simulate.streams import Stream


class Block:
    """One storage.

    Attributes:
        device: index, None for host memory.
        stream: the stream that it was allocated on; its next allocation may get this memory once it is freed.
        kept_for: numbers of the streams that `record_stream` named; the allocator waits for them.
    """

    __slots__ = ("device", "history", "kept_for", "reference", "size", "stream")

    def __init__(self, device: int | None, stream: Stream | None, size: int) -> None:
        self.device, self.stream, self.size = device, stream, size
        self.history = History()
        self.kept_for: set[int] = set()
        self.reference: object = None


class Memory:
    """All storages that the simulation has seen, by their address while they live."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._blocks: dict[int, Block] = {}
        self.freed: deque[tuple[Block, Clock, str]] = deque()

    def block(self, tensor: torch.Tensor) -> Block | None:
        """The tensor's storage; host memory when it was never seen. None for tensors without such memory."""
        storage = storage_of(tensor)
        if storage is None:
            return None
        found = self._blocks.get(storage._cdata)
        return self._enter(storage, None, None) if found is None else found

    def device_of(self, tensor: torch.Tensor) -> int | None:
        """Index of the simulated device, None for host memory."""
        storage = storage_of(tensor)
        found = None if storage is None else self._blocks.get(storage._cdata)
        return None if found is None else found.device

    def is_known(self, tensor: torch.Tensor) -> bool:
        storage = storage_of(tensor)
        return storage is None or storage._cdata in self._blocks

    def place(self, tensor: torch.Tensor, device: int | None, stream: Stream | None) -> None:
        """Write down where fresh memory lives."""
        storage = storage_of(tensor)
        if storage is not None:
            self._enter(storage, device, stream)

    @staticmethod
    def is_pinned(tensor: torch.Tensor) -> bool:
        return host_kind(tensor) == PINNED

    def _enter(self, storage: torch.UntypedStorage, device: int | None, stream: Stream | None) -> Block:
        key = storage._cdata
        block = self._blocks[key] = Block(device, stream, storage.nbytes())

        # Python's object of a storage lives as long as the storage does. This may run in any thread, at any
        # time: it only writes down when it was.
        def gone(_: object) -> None:
            if self._blocks.get(key) is block:
                del self._blocks[key]
            simulation = self._simulation
            if block.stream is not None and simulation.is_open:
                host = simulation.host_or_none()
                clock = block.stream.clock.copy()
                if host is not None:
                    clock.join(host.clock)
                self.freed.append((block, clock, "?" if host is None else host.role))

        block.reference = weakref.ref(storage, gone)
        return block
