"""Buffers kept between steps: a step of a known shape allocates nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


class Workspace:
    """Named buffers of one worker. A name's buffer grows to the largest shape asked for, and serves smaller ones as views.

    Args:
        like: a tensor that lives where the buffers shall.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like
        self._flat: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._views: dict[tuple[str, torch.dtype, tuple[int, ...]], torch.Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous buffer of this shape with whatever was left in it. The same name shares the same memory."""
        key = (name, dtype, tuple(shape))
        view = self._views.get(key)
        if view is None:
            view = self._make(key)
        return view

    def _make(self, key: tuple[str, torch.dtype, tuple[int, ...]]) -> torch.Tensor:
        name, dtype, shape = key
        size = math.prod(shape)
        flat = self._flat.get((name, dtype))
        if flat is None or flat.numel() < size:
            flat = self._like.new_empty(size, dtype=dtype)
            self._flat[name, dtype] = flat
            self._views = {other: view for other, view in self._views.items() if other[:2] != (name, dtype)}
        view = flat[:size].view(shape)
        self._views[key] = view
        return view

    @property
    def bytes(self) -> int:
        """Memory held."""
        return sum(flat.numel() * flat.element_size() for flat in self._flat.values())
