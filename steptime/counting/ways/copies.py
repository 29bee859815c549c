"""Way: wrappers of `Tensor.to`, `.cpu`, `.cuda` and `.copy_` that look at the host's side of an asynchronous
copy.

An asynchronous copy from pageable memory stages the data first, and one to pageable memory returns only when
it is done; no synchronisation call tells of either."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from steptime.counting.difference import Counts
from steptime.counting.ways.way import Notes, carried, required
from steptime.syncs.rules import is_gapped
from steptime.syncs.scopes import Scope

PAGEABLE, GAPPED = "pageable copy", "gapped copy"


def hidden_wait(
    host: torch.Tensor, *, to_device: bool, converts: bool, pinned: Callable[[torch.Tensor], bool]
) -> str | None:
    """The kind of wait that an asynchronous copy between `host` and a device hides, or None.

    Args:
        converts: source and destination differ in type. On the way to the device the host converts first,
            into pageable memory.
        pinned: whether a tensor's memory is page-locked.
    """
    if host.numel() == 0:
        return None
    if not pinned(host) or (to_device and converts):
        return PAGEABLE
    return GAPPED if is_gapped(host) else None


class CopiesWay:
    """Wraps the methods of `torch.Tensor` while anybody is armed."""

    name = "copy wrappers"
    sees = "asynchronous copies between a device and pageable or gapped host memory, by Python's copy methods"
    does_not_see = "everything else; copies that C++ makes by itself"
    every_step = True
    claims = frozenset({"pageable_copy"})
    device = "cuda"

    def __init__(self) -> None:
        self.notes = Notes()
        self._lock = threading.Lock()
        self._users = 0
        self._originals: dict[str, Any] = {}

    def available(self) -> str | None:
        return None if torch.cuda.is_available() else "no CUDA device (on the CPU the modes see these copies)"

    def arm(self, role: str) -> AbstractContextManager[object]:
        return self._armed(role)

    @contextlib.contextmanager
    def _armed(self, role: str) -> Iterator[Scope]:
        required(self)
        with self.wrapped(), carried(role) as scope:
            yield scope

    @contextlib.contextmanager
    def wrapped(self) -> Iterator[None]:
        """The wrappers, in every thread; what happens outside a scope is not counted."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._wrap("to", self._before_to)
                self._wrap("cuda", self._before_cuda)
                self._wrap("copy_", self._before_copy)
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    for name, original in self._originals.items():
                        setattr(torch.Tensor, name, original)
                    self._originals.clear()

    def _wrap(self, name: str, before: Callable[..., None]) -> None:
        original = self._originals[name] = getattr(torch.Tensor, name)

        @functools.wraps(original)
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            before(tensor, *args, **kwargs)
            return original(tensor, *args, **kwargs)

        setattr(torch.Tensor, name, call)

    def _before_to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        # `.to("cpu", non_blocking=True)` allocates a pinned destination itself, so only the way to the device
        # can hide a wait.
        if tensor.device.type != "cpu":
            return
        other = args[0] if args else kwargs.get("other")
        if isinstance(other, torch.Tensor):
            device, dtype, non_blocking = (
                other.device,
                other.dtype,
                kwargs.get("non_blocking", args[1] if len(args) > 1 else False),
            )
        else:
            options = {key: value for key, value in kwargs.items() if key != "copy"}
            device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args[:3], **options)
        if device is not None and device.type == "cuda" and non_blocking:
            self._note(tensor, to_device=True, converts=dtype is not None and dtype != tensor.dtype)

    def _before_cuda(
        self, tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any
    ) -> None:
        if tensor.device.type == "cpu" and non_blocking:
            self._note(tensor, to_device=True, converts=False)

    def _before_copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> None:
        if not non_blocking or target.device.type == source.device.type:
            return
        to_device = target.is_cuda
        self._note(
            source if to_device else target, to_device=to_device, converts=source.dtype != target.dtype
        )

    def _note(self, host: torch.Tensor, *, to_device: bool, converts: bool) -> None:
        kind = hidden_wait(
            host, to_device=to_device, converts=converts, pinned=lambda tensor: tensor.is_pinned()
        )
        if kind is not None:
            self.notes.note(kind)

    def counts(self) -> Counts:
        return self.notes.summed()
