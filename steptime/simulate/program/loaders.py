"""For a program that is counted with its CPU as the device: what loaders, samplers and `torch.load` make is
host memory there too."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import dataloader

from steptime.host_memory import PAGEABLE, PINNED, mark_host
from steptime.syncs.scopes import current_scope, noting


def _on_host(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        scope = current_scope()
        if scope is None:
            return original(*args, **kwargs)
        with noting(scope, placing="host", quiet=scope.quiet + 1):
            return original(*args, **kwargs)

    return call


def _batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """A batch that was collated is host memory; a dataset's own tensors stay what they are."""

    @functools.wraps(original)
    def call(self: Any) -> Any:
        made = _on_host(original)(self)
        if self._num_workers > 0 or self._collate_fn is torch.utils.data.default_collate:
            kind = PINNED if self._pin_memory else PAGEABLE
            tree_map_only(torch.Tensor, lambda tensor: mark_host(tensor, kind), made)
        return made

    return call


def _loaded(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        made = _on_host(original)(*args, **kwargs)
        tree_map_only(torch.Tensor, lambda tensor: mark_host(tensor, PAGEABLE), made)
        return made

    return call


def _while(active: Callable[[], bool], original: Callable[..., Any], wrap: Callable[..., Any]) -> Any:
    wrapped = wrap(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (wrapped if active() else original)(*args, **kwargs)

    return call


@contextlib.contextmanager
def host_loaders(active: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Around the program.

    Args:
        active: whether the CPU is taken for the device just now.
    """
    base = dataloader._BaseDataLoaderIter
    with (
        mock.patch.object(base, "__next__", _while(active, base.__next__, _batch)),
        mock.patch.object(base, "__init__", _while(active, base.__init__, _on_host)),
        mock.patch.object(torch, "load", _while(active, torch.load, _loaded)),
    ):
        yield
