"""Which storages a program put on its simulated CUDA device. Whatever is not written down is host memory, so
what loaders, samplers, worker processes and `torch.load` make needs no mark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from steptime.host_memory import host_kind, storage_of
from steptime.syncs.boundary import Boundary

NAME = torch.device("cuda", 0)
_SWEEP_EVERY = 4096


class ProgramBoundary(Boundary):
    """The boundary of a program that believes that it has one CUDA device.

    Until the program first puts something on CUDA, its CPU is taken for the device by the loose rules: a
    program that never does (`use_cpu=True`) is still counted. What was counted before that moment is dropped,
    since nothing waits for a device with nothing on it.

    Args:
        on_first_use: called once, at that moment.

    Attributes:
        used: the program has put something on CUDA.
        placed: storages that were ever put on the device.
    """

    name = NAME

    def __init__(self, on_first_use: Callable[[], None] = lambda: None) -> None:
        super().__init__(cuda=False, strict=False)
        self._marks: dict[int, StorageWeakRef] = {}
        self._on_first_use = on_first_use
        self.used = False
        self.placed = 0

    def use(self) -> None:
        """The program puts something on CUDA."""
        if not self.used:
            self.used = self.strict = True
            self._on_first_use()

    def modes(self) -> tuple[Any, Any]:
        from steptime.simulate.program.modes import ProgramDispatch, ProgramFunctions

        return ProgramFunctions, ProgramDispatch

    def is_device(self, tensor: torch.Tensor) -> bool:
        """Whether its memory stands for the device's; before the first use, whether the CPU's would."""
        if not self.used:
            return not tensor.is_meta and host_kind(tensor) is None
        return self.is_cuda(tensor)

    def is_cuda(self, tensor: torch.Tensor) -> bool:
        """Whether it was put on CUDA: what the program itself is told."""
        storage = storage_of(tensor)
        if storage is not None:
            return storage._cdata in self._marks
        parts = _parts(tensor)
        return bool(parts) and self.is_cuda(parts[0])

    def place(self, tensor: torch.Tensor, on_device: bool) -> None:
        if not self.used:
            super().place(tensor, on_device)
            return
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
        self.use()
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
        if device.type == "cuda":
            self.use()
            return True
        return None if device.type == "cpu" and not self.used else False


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors that a sparse one is made of."""
    if tensor.layout == torch.sparse_coo:
        return [tensor._values(), tensor._indices()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return [tensor.values()]
    return []
