"""The function mode: Python reads and moves that dispatch nothing on the CPU, and the boundary there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _device as default_device

from steptime.host_memory import PINNED, mark_host
from steptime.syncs import scopes as ledger
from steptime.syncs.boundary import Boundary, count_copy
from steptime.syncs.scopes import Scope, noting

_FACTORIES = {
    torch.arange,
    torch.bartlett_window,
    torch.blackman_window,
    torch.empty,
    torch.empty_permuted,
    torch.empty_strided,
    torch.eye,
    torch.full,
    torch.hamming_window,
    torch.hann_window,
    torch.kaiser_window,
    torch.linspace,
    torch.logspace,
    torch.normal,
    torch.ones,
    torch.rand,
    torch.randint,
    torch.randn,
    torch.randperm,
    torch.range,
    torch.scalar_tensor,
    torch.tril_indices,
    torch.triu_indices,
    torch.zeros,
}
_LIKE = {
    torch.empty_like,
    torch.full_like,
    torch.ones_like,
    torch.rand_like,
    torch.randint_like,
    torch.randn_like,
    torch.zeros_like,
    torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
    torch.Tensor.new_full,
    torch.Tensor.new_ones,
    torch.Tensor.new_zeros,
}
_FROM_VALUES = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}
_READS = {
    torch.Tensor.item: "item()",
    torch.Tensor.__bool__: "truth test",
    torch.Tensor.__float__: "float()",
    torch.Tensor.__int__: "int()",
    torch.Tensor.__index__: "int()",
    torch.Tensor.__complex__: "complex()",
}
_WHOLE = {
    torch.Tensor.tolist: "tolist()",
    torch.Tensor.numpy: "numpy()",
    torch.Tensor.__array__: "numpy()",
    torch.Tensor.__repr__: "print",
    torch.Tensor.__format__: "print",
    torch.Tensor.__reduce_ex__: "save",
}
_DEVICE_OF = torch.Tensor.device.__get__  # type: ignore[attr-defined]


class FunctionCounter(TorchFunctionMode):
    """Sees what dispatches nothing on the CPU, and keeps the boundary there."""

    def __init__(self, scope: Scope, boundary: Boundary) -> None:
        super().__init__()
        self._scope, self._boundary = scope, boundary
        self._handlers: dict[Any, Callable[..., Any]] = {
            torch.Tensor.__getitem__: self._getitem,
            torch.Tensor.__setitem__: self._setitem,
            torch._C._nn.one_hot: self._one_hot,
        }
        self._handlers.update(dict.fromkeys(_FROM_VALUES, self._from_values))
        self._handlers.update(dict.fromkeys(_READS, self._read))
        self._handlers.update(dict.fromkeys(_WHOLE, self._whole))
        if not boundary.cuda:
            self._handlers.update(dict.fromkeys(_FACTORIES, self._factory))
            self._handlers.update(dict.fromkeys(_LIKE, self._like))
            self._handlers[torch.Tensor.to] = self._to
            self._handlers[torch.Tensor.cpu] = self._to_host
            if boundary.strict:
                self._handlers[_DEVICE_OF] = self._device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = self._handlers.get(func)
        if handler is None or self._scope.quiet:
            return func(*args, **(kwargs or {}))
        return handler(func, args, kwargs or {})

    def _noting(self, **notes: Any) -> contextlib.AbstractContextManager[None]:
        return noting(self._scope, **notes)

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self._noting(label=_READS[func]):
            return func(*args, **kwargs)

    def _whole(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._boundary.is_device(args[0]):
            self._scope.record(_WHOLE[func])
        with self._noting(quiet=1):
            return func(*args, **kwargs)

    def _one_hot(self, func: Any, args: Any, kwargs: Any) -> Any:
        # On the CPU it checks its values even with a class count; on CUDA it does not.
        classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
        if not self._boundary.is_device(args[0]):
            return func(*args, **kwargs)
        if classes == -1:
            self._scope.record("one_hot")
        self._scope.record(ledger.OPERATION)
        self._scope.record(ledger.ALLOCATION)
        with self._noting(quiet=1):
            return func(*args, **kwargs)

    def _getitem(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._boundary.is_device(args[0]) and _has_host_index(args[1]):
            self._scope.record("index on the host")
        return func(*args, **kwargs)

    def _setitem(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._boundary.is_device(args[0]) and _has_host_index(args[1]):
            self._scope.record("index on the host")
        with self._noting(free_value=not isinstance(args[2], torch.Tensor)):
            return func(*args, **kwargs)

    def _from_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        boundary, scope = self._boundary, self._scope
        method = func is torch.Tensor.new_tensor
        source = args[1] if method and len(args) > 1 else (args[0] if args and not method else None)
        if isinstance(source, torch.Tensor):
            return func(*args, **kwargs)
        wanted = boundary.names_device((_device_argument if method else _wanted_device)(kwargs))
        if wanted is None and method:
            wanted = boundary.is_device(args[0])
        to_device = bool(wanted)
        with self._noting(quiet=scope.quiet + 1, placing="device" if to_device else "host"):
            made = func(*args, **kwargs)
        if to_device:
            if not boundary.cuda and type(source).__module__ == "numpy":
                made = self._crossed(made, to_device=True)  # as_tensor may share the array's memory
            _count_value_copy(scope, made, made.numel())
        boundary.place(made, to_device)
        return made

    def _factory(self, func: Any, args: Any, kwargs: Any) -> Any:
        wanted = self._boundary.names_device(_wanted_device(kwargs))
        if wanted is None:
            wanted = not self._boundary.strict
        with self._noting(placing="device" if wanted else "host"):
            return func(*args, **kwargs)

    def _like(self, func: Any, args: Any, kwargs: Any) -> Any:
        wanted = self._boundary.names_device(_device_argument(kwargs))
        if wanted is None:
            wanted = self._boundary.is_device(args[0])
        with self._noting(placing="device" if wanted else "host"):
            return func(*args, **kwargs)

    def _device(self, func: Any, args: Any, kwargs: Any) -> Any:
        device = func(*args, **kwargs)
        return self._boundary.name if device.type == "cpu" and self._boundary.is_device(args[0]) else device

    def _to_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        if not self._boundary.is_device(tensor):
            return func(*args, **kwargs)
        copied = self._crossed(tensor, to_device=False)
        count_copy(self._scope, self._boundary, copied, copied.numel(), to_device=False, blocking=True)
        return copied

    def _to(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor, scope, boundary = args[0], self._scope, self._boundary
        if tensor.is_meta or _names_meta(args, kwargs):
            return func(*args, **kwargs)
        wanted, dtype, non_blocking, memory_format = self._parse_to(tensor, *args[1:], **kwargs)
        # `cpu:0` is only a name, at which PyTorch would copy every time: the device goes, the rest of the
        # call stays.
        local = {
            "dtype": dtype or tensor.dtype,
            "copy": bool(kwargs.get("copy", False)),
            "memory_format": memory_format,
        }
        if local["memory_format"] is None:
            del local["memory_format"]
        if wanted == boundary.is_device(tensor):
            return func(tensor, **local)
        # PyTorch converts on the side where the tensor is, then copies; on the host through pageable memory.
        converted = func(tensor, **local) if local["dtype"] != tensor.dtype else tensor
        moved = self._crossed(converted, to_device=wanted)
        if not wanted and non_blocking:
            mark_host(moved, PINNED)  # PyTorch allocates the destination pinned itself
        host = converted if wanted else moved
        count_copy(scope, boundary, host, tensor.numel(), to_device=wanted, blocking=not non_blocking)
        if wanted:
            scope.record(ledger.ALLOCATION)
        return moved

    def _parse_to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[bool, Any, bool, Any]:
        """Whether the result is on the device, its type, non_blocking, memory format."""
        boundary = self._boundary
        other = args[0] if args else kwargs.get("other")
        if isinstance(other, torch.Tensor):
            return (
                boundary.is_device(other),
                other.dtype,
                bool(kwargs.get("non_blocking", False)),
                kwargs.get("memory_format"),
            )
        kwargs.pop("copy", None)
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args[:3], **kwargs)
        wanted = boundary.names_device(device)
        if wanted is None:
            # At the loose boundary `.to("cpu")` is how a program moves to its device.
            wanted = device is not None or boundary.is_device(tensor)
        return wanted, dtype, non_blocking, memory_format

    def _crossed(self, tensor: torch.Tensor, *, to_device: bool) -> torch.Tensor:
        """A copy in memory of the other side."""
        with self._noting(quiet=self._scope.quiet + 1, placing="device" if to_device else "host"):
            return tensor.clone()


def _count_value_copy(scope: Scope, made: torch.Tensor, elements: int) -> None:
    """Python values go to the device: a pageable copy that waits. Of no values nothing goes."""
    if not elements:
        return
    scope.record(ledger.COPY_TO_DEVICE)
    scope.record(ledger.BYTES_TO_DEVICE, elements * made.element_size())
    scope.record("blocking copy to device")
    scope.record(ledger.ALLOCATION)


def _device_argument(kwargs: dict[str, Any]) -> torch.device | None:
    device = kwargs.get("device")
    if device is None:
        return None
    if isinstance(device, int):
        return torch.device("cuda", device)
    return torch.device(device)


def _wanted_device(kwargs: dict[str, Any]) -> torch.device | None:
    """Where a factory puts what it makes: as it is told, or where `with torch.device(...)` or
    `set_default_device` says. PyTorch asks that context behind every other mode, so a mode does not see its
    answer."""
    return _device_argument(kwargs) or default_device.CURRENT_DEVICE


def _names_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a move goes to the meta device, which holds no values and is neither host nor device."""
    for word in (*args[1:], *kwargs.values()):
        if isinstance(word, torch.Tensor):
            if word.is_meta:
                return True
        elif isinstance(word, (str, torch.device)) and str(word).startswith("meta"):
            return True
    return False


def _has_host_index(index: Any) -> bool:
    """A list or array of integers as index is made into a tensor on the host and read there."""
    if isinstance(index, tuple):
        return any(_has_host_index(part) for part in index)
    if isinstance(index, (list, range)):
        return len(index) > 0 and all(isinstance(part, int) and not isinstance(part, bool) for part in index)
    return type(index).__module__ == "numpy" and getattr(index, "ndim", 0) > 0 and index.dtype.kind in "iu"
