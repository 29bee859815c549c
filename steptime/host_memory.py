"""Which CPU tensors stand for host memory on a machine whose "GPUs" are the CPU.

On CUDA a tensor says itself where it lives. On the CPU everything lives in one memory, so a sync counter
could not tell a batch that waits in pinned memory from a hidden state on the drafter's GPU. Host memory is
therefore written down where it is made; everything else that a worker holds is on its device. Marks belong to
storages: a view is where its base is.

A process that trains on CUDA needs no marks and makes none: `staging` and `staged` mark only where there is
no CUDA, or once a counter of CPU workers has asked for it (`keep_marks`)."""

from __future__ import annotations

import functools

import torch
from torch.multiprocessing.reductions import StorageWeakRef

PINNED = "pinned"
PAGEABLE = "pageable"

_SWEEP_EVERY = 4096

# A weak reference keeps the address of a dead storage from being used again, so that an entry never names
# another tensor.
_marks: dict[int, tuple[StorageWeakRef, str]] = {}
_made = 0
_asked = False


@functools.cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()


def keep_marks() -> None:
    """From now on mark what is staged: CPU workers are counted on a machine that has CUDA. Before their
    buffers are made."""
    global _asked
    _asked = True


def mark_host(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """Write down that the CPU tensor's memory is host memory, `PINNED` or `PAGEABLE`. Returns the tensor."""
    global _made
    storage = storage_of(tensor)
    if storage is None:
        return tensor
    _marks[storage._cdata] = (StorageWeakRef(storage), kind)
    _made += 1
    if _made % _SWEEP_EVERY == 0:
        for key, (reference, _) in _marks.copy().items():
            if reference.expired():
                _marks.pop(key, None)
    return tensor


def host_kind(tensor: torch.Tensor) -> str | None:
    """`PINNED` or `PAGEABLE` for marked host memory; None for everything else."""
    if not _marks:
        return None
    storage = storage_of(tensor)
    found = None if storage is None else _marks.get(storage._cdata)
    return None if found is None else found[1]


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """A tensor's memory, below what `vmap` and the like wrap around it; None for tensors that have no such
    memory."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor.untyped_storage() if tensor.layout == torch.strided else None


def staging(shape: tuple[int, ...], dtype: torch.dtype, *, pin: bool) -> torch.Tensor:
    """Uninitialised host memory, page-locked where there is CUDA to do it for; without CUDA it is only marked
    so."""
    return _marked(torch.empty(shape, dtype=dtype, pin_memory=pin and _has_cuda()), pin)


def staged(tensor: torch.Tensor, *, pin: bool) -> torch.Tensor:
    """The same values in memory like that of `staging`: a copy where memory can be page-locked, else the
    tensor itself."""
    return _marked(tensor.pin_memory() if pin and _has_cuda() else tensor, pin)


def _marked(tensor: torch.Tensor, pin: bool) -> torch.Tensor:
    if _asked or not _has_cuda():
        mark_host(tensor, PINNED if pin else PAGEABLE)
    return tensor
