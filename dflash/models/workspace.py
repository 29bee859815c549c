"""Buffers kept between steps: a step of a known shape allocates nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


class Workspace:
    """Named buffers of one worker. A name's buffer grows to the largest shape asked for, and serves smaller
    ones as views.

    Two users of one name would spoil each other's numbers without an error. So no view is kept, and a buffer
    is taken only when no tensor over it is left, until the owner sets `checking` to False after one whole
    pass.

    Args:
        like: a tensor that lives where the buffers shall.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like.new_empty(0)  # of the given one not even the memory is kept
        self.checking = True
        self._flat: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._views: dict[tuple[str, torch.dtype, tuple[int, ...]], torch.Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous buffer of this shape with what was left in it. The same name shares the same memory.

        Raises:
            RuntimeError: while checking: somebody still holds the buffer.
        """
        key = (name, dtype, tuple(shape))
        view = self._views.get(key)
        if view is None:
            view = self._make(key)
        return view

    def _make(self, key: tuple[str, torch.dtype, tuple[int, ...]]) -> torch.Tensor:
        name, dtype, shape = key
        size = math.prod(shape)
        flat = self._flat.get((name, dtype))
        if self.checking and flat is not None and _tensors_over(flat) > 1:
            why = "it has two users, or a forward came before the last backward"
            raise RuntimeError(f"buffer {name!r} is taken in use: {why}")
        if flat is None or flat.numel() < size:
            flat = self._like.new_empty(size, dtype=dtype)
            self._flat[name, dtype] = flat
            self._views = {other: view for other, view in self._views.items() if other[:2] != (name, dtype)}
        view = flat[:size].view(shape)
        if not self.checking:
            self._views[key] = view
        return view

    @property
    def bytes(self) -> int:
        """Memory held."""
        return sum(flat.numel() * flat.element_size() for flat in self._flat.values())


def _tensors_over(tensor: torch.Tensor) -> int:
    """How many tensors share its memory, itself included; the storage that is asked is one user more."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1
