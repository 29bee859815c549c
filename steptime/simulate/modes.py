"""The two modes that put a thread's tensors under the rules of its simulated devices.

A tensor's `.device` says `cpu:K` on simulated device K, and `cpu` on the host. With
`device=torch.device("cpu", K)` a program asks for that device. The values are computed by the CPU's own
kernels at once, so a program without races gives the numbers that it gives on the CPU. Copies between
devices, and between a device and the host, make memory of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from steptime.host_memory import PAGEABLE, mark_host
from steptime.simulate.hosts import Host
from steptime.simulate.operations import Operations
from steptime.simulate.simulation import Simulation
from steptime.syncs import calls
from steptime.syncs import functions as counted
from steptime.syncs.scopes import Ledger, Scope, noting
from steptime.syncs.scopes import entered as scope_entered


class SimulatedDispatch(TorchDispatchMode):
    """Gives every operator its stream, its memory and its check."""

    def __init__(self, simulation: Simulation, scope: Scope) -> None:
        super().__init__()
        self.sync_scope = scope
        self._operations = Operations(simulation)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            if self._operations.is_composite(func):
                # In inference mode composites arrive whole.
                with self:
                    return func.decompose(*args, **(kwargs or {}))
            return self._operations.run(func, args, kwargs or {})


class _Move(torch.autograd.Function):
    """A copy to another device, whose gradient comes back to this one."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, mode: SimulatedFunctions, wanted: int | None, arguments: Any
    ) -> Any:
        ctx.mode, ctx.source, ctx.dtype = mode, mode.device_of(tensor), tensor.dtype
        return mode.move(tensor, wanted, **arguments)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.mode.move(grads[0], ctx.source, dtype=ctx.dtype, non_blocking=False), None, None, None


class SimulatedFunctions(TorchFunctionMode):
    """Keeps the devices' names where PyTorch's C++ knows one CPU only."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self.simulation = simulation
        self.device_of = simulation.memory.device_of
        self._handlers: dict[Any, Callable[..., Any]] = {
            torch.Tensor.__getitem__: self._getitem,
            torch.Tensor.__setitem__: self._setitem,
            torch.Tensor.to: self._to,
            torch.Tensor.cpu: self._cpu,
            counted._DEVICE_OF: self._device,
        }
        self._handlers.update(dict.fromkeys(counted._FROM_VALUES, self._from_values))
        self._handlers.update(dict.fromkeys(counted._READS, self._read))
        self._handlers.update(dict.fromkeys(counted._WHOLE, self._whole))
        self._handlers.update(dict.fromkeys(counted._FACTORIES, self._factory))
        self._handlers.update(dict.fromkeys(counted._LIKE, self._like))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        host = self.simulation.host()
        handler = self._handlers.get(func)
        if host.quiet:
            return func(*args, **(kwargs or {}))
        if handler is not None:
            return handler(host, func, args, kwargs or {})
        before, host.call = host.call, (args, kwargs)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            host.call = before

    def _read(self, host: Host, func: Any, args: Any, kwargs: Any) -> Any:
        with noting(host, label=counted._READS[func]):
            return func(*args, **kwargs)

    def _whole(self, host: Host, func: Any, args: Any, kwargs: Any) -> Any:
        Operations(self.simulation).read_on_host(host, args[0], counted._WHOLE[func])
        with noting(host, quiet=host.quiet + 1):
            return func(*args, **kwargs)

    def _getitem(self, host: Host, func: Any, args: Any, kwargs: Any) -> Any:
        if counted._has_host_index(args[1]):
            self._index_on_host(host, args[0])
        return func(*args, **kwargs)

    def _setitem(self, host: Host, func: Any, args: Any, kwargs: Any) -> Any:
        if counted._has_host_index(args[1]):
            self._index_on_host(host, args[0])
        with noting(host, free_value=not isinstance(args[2], torch.Tensor)):
            return func(*args, **kwargs)

    def _index_on_host(self, host: Host, tensor: torch.Tensor) -> None:
        device = self.device_of(tensor)
        if device is not None:
            simulation = self.simulation
            simulation.host_waits("index on the host", simulation.current_stream(host, device).clock)

    def _device(self, host: Host, func: Any, args: Any, kwargs: Any) -> Any:
        device = func(*args, **kwargs)
        index = self.device_of(args[0]) if device.type == "cpu" else None
        return device if index is None else torch.device("cpu", index)

    def _factory(self, host: Host, func: Any, args: Any, kwargs: Any) -> Any:
        wanted = counted._wanted_device(kwargs)
        with noting(host, placing=None if wanted is None else wanted.index):
            return func(*args, **kwargs)

    def _like(self, host: Host, func: Any, args: Any, kwargs: Any) -> Any:
        wanted = counted._device_argument(kwargs)
        index = self.device_of(args[0]) if wanted is None else wanted.index
        with noting(host, placing=index):
            return func(*args, **kwargs)

    def _from_values(self, host: Host, func: Any, args: Any, kwargs: Any) -> Any:
        method = func is torch.Tensor.new_tensor
        source = args[1] if method and len(args) > 1 else (args[0] if args and not method else None)
        told = (
            counted._device_argument if method or isinstance(source, torch.Tensor) else counted._wanted_device
        )
        wanted = told(kwargs)
        if wanted is not None and wanted.type == "meta":
            return func(*args, **kwargs)
        index = None if wanted is None else wanted.index
        if wanted is None and method:
            index = self.device_of(args[0])
        if isinstance(source, torch.Tensor):
            return (
                func(*args, **kwargs)
                if wanted is None
                else self.moved(source, index, dtype=kwargs.get("dtype"))
            )
        kwargs.pop("device", None)
        with noting(host, placing=None, quiet=host.quiet + 1):
            made = func(*args, **kwargs)
        self.simulation.memory.place(made, None, None)
        mark_host(made, PAGEABLE)
        if index is None:
            return made
        wants_grad = made.requires_grad
        moved = self.move(made.detach(), index, dtype=None, non_blocking=False)
        return moved.requires_grad_(wants_grad)

    def _cpu(self, host: Host, func: Any, args: Any, kwargs: Any) -> Any:
        return self.moved(args[0], None)

    def _to(self, host: Host, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        other = args[1] if len(args) > 1 else kwargs.get("other")
        copy = bool(kwargs.get("copy", False))
        if isinstance(other, torch.Tensor):
            index, dtype = self.device_of(other), other.dtype
            non_blocking, memory_format = bool(kwargs.get("non_blocking", False)), kwargs.get("memory_format")
        else:
            rest = {name: value for name, value in kwargs.items() if name != "copy"}
            device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args[1:4], **rest)
            index = self.device_of(tensor) if device is None else device.index
        if index == self.device_of(tensor):
            local = {} if memory_format is None else {"memory_format": memory_format}
            return func(tensor, dtype=dtype or tensor.dtype, copy=copy, **local)
        return self.moved(tensor, index, dtype=dtype, non_blocking=non_blocking, memory_format=memory_format)

    def moved(self, tensor: torch.Tensor, index: int | None, **arguments: Any) -> torch.Tensor:
        """The tensor on that device: itself when it is there, else a copy with a gradient back."""
        if index == self.device_of(tensor) and arguments.get("dtype") in (None, tensor.dtype):
            return tensor
        if tensor.requires_grad and torch.is_grad_enabled():
            made: torch.Tensor = _Move.apply(tensor, self, index, arguments)
            return made
        return self.move(tensor, index, **arguments)

    def move(
        self,
        tensor: torch.Tensor,
        index: int | None,
        *,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format | None = None,
    ) -> torch.Tensor:
        """A copy in memory of that device."""
        host = self.simulation.host()
        pinned = index is None and non_blocking
        with noting(host, placing=(index, pinned)):
            return torch.ops.aten._to_copy(
                tensor, dtype=dtype, non_blocking=non_blocking, memory_format=memory_format
            )


@contextlib.contextmanager
def entered(simulation: Simulation) -> Iterator[None]:
    """Put the calling thread under the rules; calls nest."""
    host = simulation.host()
    host.modes += 1
    try:
        if host.modes > 1:
            yield
            return
        scope = Scope(host.role, True, Ledger())
        scope.simulated = scope.unfused = True
        functions = SimulatedFunctions(simulation)
        scope.function_mode = functions
        calls.install()
        try:
            with scope_entered(scope), functions, SimulatedDispatch(simulation, scope):
                yield
        finally:
            calls.uninstall()
    finally:
        host.modes -= 1
