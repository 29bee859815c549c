"""Watches what a piece of code does: values read to the host, shapes made, live bytes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::equal",
    "aten::is_nonzero",
    "aten::bincount",
    "aten::repeat_interleave.Tensor",
}


@dataclass
class Seen:
    """reads: operations that would wait on a GPU. shapes: of every result, in order. peak: most bytes alive
    at one time."""

    reads: list[str] = field(default_factory=list)
    shapes: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    peak: int = 0
    live: int = 0
    biggest: int = 0


class _Watch(TorchDispatchMode):
    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen
        self.storages: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        if name in READS or schema.name in READS:
            self.seen.reads.append(name)
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.seen.shapes.append((name, tuple(tensor.shape)))
                self._count(tensor)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.storages:
            return
        self.storages[key] = size
        self.seen.live += size
        self.seen.peak = max(self.seen.peak, self.seen.live)
        self.seen.biggest = max(self.seen.biggest, size)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.seen.live -= self.storages.pop(key, 0)


@contextmanager
def watch() -> Iterator[Seen]:
    seen = Seen()
    with _Watch(seen):
        yield seen
