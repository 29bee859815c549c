"""The counting modes for a program that names its device `cuda`: the rules are those of `steptime.syncs`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils import _device as default_device

from steptime.host_memory import PINNED, host_kind, mark_host
from steptime.simulate.program.memory import NAME, ProgramBoundary
from steptime.syncs.boundary import count_copy
from steptime.syncs.dispatch import DispatchCounter
from steptime.syncs.functions import FunctionCounter, _count_value_copy, _device_argument, _wanted_device
from steptime.syncs.rules import operation
from steptime.syncs.scopes import Scope, noting

_T = torch.Tensor
_HOST = torch.device("cpu")


class ProgramFunctions(FunctionCounter):
    """Answers for the device what a CUDA tensor would answer, and turns `device="cuda"` into a place."""

    def __init__(self, scope: Scope, boundary: ProgramBoundary) -> None:
        super().__init__(scope, boundary)
        self._program = boundary
        self._handlers |= {
            _T.device.__get__: self._device,  # type: ignore[attr-defined]
            _T.is_cuda.__get__: lambda func, args, kwargs: boundary.is_cuda(args[0]),  # type: ignore[attr-defined]
            _T.is_cpu.__get__: lambda func, args, kwargs: (  # type: ignore[attr-defined]
                func(*args, **kwargs) and not boundary.is_cuda(args[0])
            ),
            _T.get_device: lambda func, args, kwargs: 0 if boundary.is_cuda(args[0]) else func(*args),
            _T.grad.__get__: self._grad,  # type: ignore[union-attr]
            _T.cuda: self._cuda,
            _T.pin_memory: self._pin,
            _T.is_pinned: lambda func, args, kwargs: boundary.is_pinned(args[0]),
            _T.__deepcopy__: self._deepcopy,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._scope.quiet:
            if _names_cuda(kwargs):
                kwargs = {**kwargs, "device": _HOST}
            return func(*args, **kwargs)
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        if _names_cuda(kwargs):
            return self._factory(func, args, kwargs)
        return func(*args, **kwargs)

    def _factory(self, func: Any, args: Any, kwargs: Any) -> Any:
        device = _wanted_device(kwargs)
        wanted = self._boundary.names_device(device)
        return self._placed(func, args, kwargs, not self._boundary.strict if wanted is None else wanted)

    def _like(self, func: Any, args: Any, kwargs: Any) -> Any:
        wanted = self._boundary.names_device(_device_argument(kwargs))
        if wanted is None:
            # Of something on `meta` it is new memory, as from a factory.
            fresh = args[0].is_meta and "device" in kwargs
            wanted = not self._boundary.strict if fresh else self._boundary.is_device(args[0])
        return self._placed(func, args, kwargs, wanted)

    def _placed(self, func: Any, args: Any, kwargs: Any, on_device: bool) -> Any:
        pin = not on_device and bool(kwargs.pop("pin_memory", False))
        if on_device:
            kwargs = {**kwargs, "device": _HOST}
        with self._noting(placing="device" if on_device else "host"):
            made = func(*args, **kwargs)
        return mark_host(made, PINNED) if pin else made

    def _from_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        device = _device_argument(kwargs)
        if func is _T.new_tensor:
            like, *args = args
            kwargs = {"dtype": like.dtype, **kwargs}
            func, device = torch.tensor, device or (NAME if self._boundary.is_device(like) else _HOST)
        else:
            device = device or default_device.CURRENT_DEVICE
        source = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        if not self._program.used and _is_cpu(device) and not _in_optimizer():
            return self._to_own_cpu(func, args, kwargs, source)
        if not isinstance(source, _T):
            named = {} if device is None else {"device": device}
            return super()._from_values(_at_host(func), args, {**kwargs, **named})
        rest = {name: value for name, value in kwargs.items() if name not in ("data", "obj")}
        if device is None or device.type == "meta":
            return func(source, *args[1:], **rest)
        if self._boundary.names_device(device) != self._boundary.is_device(source):
            source = self._to(_T.to, (source, device), {})
        return func(source, *args[1:], **{**rest, "device": _HOST})

    def _to_own_cpu(self, func: Any, args: Any, kwargs: Any, source: Any) -> Any:
        """A program without CUDA names its device so: the values go there."""
        crosses = not isinstance(source, _T) or not self._boundary.is_device(source)
        with self._noting(quiet=self._scope.quiet + 1, placing="device"):
            made = func(*args, **kwargs)
        if crosses:
            _count_value_copy(self._scope, made, made.numel())
        return made

    def _parse_to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[bool, Any, bool, Any]:
        if args and isinstance(args[0], int) and not isinstance(args[0], bool):
            args = (torch.device("cuda", args[0]), *args[1:])
        return super()._parse_to(tensor, *args, **kwargs)

    def _cuda(self, func: Any, args: Any, kwargs: Any) -> Any:
        device = args[1] if len(args) > 1 else kwargs.get("device")
        waits_not = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        named = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        return self._to(_T.to, (args[0], named), {"non_blocking": waits_not})

    def _pin(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        if self._program.is_cuda(tensor):
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        if host_kind(tensor) == PINNED:
            return tensor
        return mark_host(self._crossed(tensor, to_device=False), PINNED)

    def _grad(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Where its tensor is, also when code that torch generated made it unseen."""
        found = func(*args, **kwargs)
        if found is not None and self._program.is_cuda(args[0]) and not self._program.is_cuda(found):
            self._boundary.place(found, True)
        return found

    def _device(self, func: Any, args: Any, kwargs: Any) -> Any:
        return NAME if self._program.is_cuda(args[0]) else func(*args, **kwargs)

    def _deepcopy(self, func: Any, args: Any, kwargs: Any) -> Any:
        made = func(*args, **kwargs)
        if isinstance(made, _T) and self._program.used:
            self._boundary.place(made, self._boundary.is_device(args[0]))
        return made


class ProgramDispatch(DispatchCounter):
    """What reaches operators with `device="cuda"` past the function mode."""

    _boundary: ProgramBoundary

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device")
        if device is None or device.type not in ("cuda", "cpu") or self.sync_scope.placing is not None:
            if device is not None and device.type == "cuda":
                kwargs = {**kwargs, "device": _HOST}
            return super()._dispatch(func, args, kwargs)
        boundary, on_device = self._boundary, device.type == "cuda"
        boundary.names_device(device)
        if operation(func).name == "aten::_to_copy":
            source = args[0]
            if device.type == "cpu" and not on_device and not _moves(kwargs):
                on_device = boundary.is_device(source)
            if on_device != boundary.is_device(source):
                waits = not kwargs.get("non_blocking", False)
                count_copy(
                    self.sync_scope, boundary, source, source.numel(), to_device=on_device, blocking=waits
                )
        elif not on_device:
            on_device = self._follows(args)
        with noting(self.sync_scope, placing="device" if on_device else "host"):
            return super()._dispatch(func, args, {**kwargs, "device": _HOST})

    def _follows(self, args: Any) -> bool:
        """C++ repeats a tensor's own device, which it takes for the CPU."""
        return any(isinstance(one, _T) and self._boundary.is_device(one) for one in args)


def _is_cpu(device: torch.device | None) -> bool:
    return device is not None and device.type == "cpu"


def _in_optimizer() -> bool:
    """Whether torch's own optimizer calls: it counts its steps on the host."""
    file = sys._getframe(3).f_code.co_filename.replace("\\", "/")
    return "/torch/optim/" in file


def _moves(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("dtype") is None and kwargs.get("layout") is None


def _names_cuda(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is None or isinstance(device, _T):
        return False
    return (isinstance(device, int) and not isinstance(device, bool)) or str(device).startswith("cuda")


def _at_host(func: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = _HOST
        return func(*args, **kwargs)

    return call
