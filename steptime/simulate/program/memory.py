"""Which storages a program put on its simulated CUDA device. Whatever is not written down is host memory, so
what loaders, samplers, worker processes and `torch.load` make needs no mark."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from steptime.host_memory import storage_of
from steptime.syncs.boundary import Boundary

NAME = torch.device("cuda", 0)
_SWEEP_EVERY = 4096


class ProgramBoundary(Boundary):
    """The boundary of a program that believes that it has one CUDA device.

    Attributes:
        placed: storages that were ever put on the device; 0: the program never used it.
    """

    name = NAME

    def __init__(self) -> None:
        super().__init__(cuda=False, strict=True)
        self._marks: dict[int, StorageWeakRef] = {}
        self.placed = 0

    def modes(self) -> tuple[Any, Any]:
        from steptime.simulate.program.modes import ProgramDispatch, ProgramFunctions

        return ProgramFunctions, ProgramDispatch

    def is_device(self, tensor: torch.Tensor) -> bool:
        storage = storage_of(tensor)
        if storage is not None:
            return storage._cdata in self._marks
        parts = _parts(tensor)
        return bool(parts) and self.is_device(parts[0])

    def place(self, tensor: torch.Tensor, on_device: bool) -> None:
        if not on_device or tensor.device.type != "cpu":
            return
        storage = storage_of(tensor)
        if storage is not None:
            self.place_storage(storage)
            return
        for part in _parts(tensor):
            self.place(part, True)

    def place_result(self, tensor: torch.Tensor) -> None:
        if self._marks and not self.is_device(tensor):
            self.place(tensor, True)

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is on the device."""
        return storage._cdata in self._marks

    def place_storage(self, storage: torch.UntypedStorage) -> None:
        """Write down that it is on the device."""
        # The weak reference keeps a dead storage's address from naming another one.
        self._marks[storage._cdata] = StorageWeakRef(storage)
        self.placed += 1
        if self.placed % _SWEEP_EVERY == 0:
            for key, reference in self._marks.copy().items():
                if reference.expired():
                    self._marks.pop(key, None)

    def names_device(self, device: torch.device | None) -> bool | None:
        """Raises RuntimeError, as CUDA does, for a device that is not there."""
        if device is None:
            return None
        if device.type == "cuda" and (device.index or 0) > 0:
            raise RuntimeError(f"CUDA error: invalid device ordinal: {device} (one device is simulated)")
        return device.type == "cuda"


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors that a sparse one is made of."""
    if tensor.layout == torch.sparse_coo:
        return [tensor._values(), tensor._indices()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return [tensor.values()]
    return []
