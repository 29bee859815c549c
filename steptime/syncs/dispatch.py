"""The dispatch mode: every operator of a worker and of its backward, with where its tensors live."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from steptime.host_memory import storage_of
from steptime.syncs import scopes as ledger
from steptime.syncs.boundary import Boundary, count_copy
from steptime.syncs.rules import Operation, operation, sync_kind, tensors_in
from steptime.syncs.scopes import Scope


class WatchingMode(TorchDispatchMode):
    """A mode that sees operators and changes none: under it torch runs what it compiled, and higher-order
    operators."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class DispatchCounter(WatchingMode):
    """Counts operators: syncs, kernels, allocations. Inherited by autograd's threads."""

    def __init__(self, scope: Scope, boundary: Boundary) -> None:
        super().__init__()
        self.sync_scope, self._boundary = scope, boundary

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        scope, boundary = self.sync_scope, self._boundary
        if scope.region is not None and scope.graph is None:
            scope.region.operators += 1
        if isinstance(func, HigherOrderOperator):
            # Its operands may be functions; what it runs inside counts with it.
            if scope.on_device:
                scope.record(ledger.OPERATION)
            return func(*args, **kwargs)
        facts = operation(func)
        if facts.composite and torch.is_inference_mode_enabled() and not scope.quiet:
            # In inference mode composites arrive whole; their parts are what waits.
            with self:
                return func.decompose(*args, **kwargs)
        name = facts.name
        crosses = False
        kind = sync_kind(name, args, kwargs, boundary.is_device, scope.free_value)
        if kind is not None:
            scope.record(scope.label or kind)
        elif name == "aten::copy_":
            crosses = self._copy(
                args[0], args[1], bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
            )
        elif name == "aten::_to_copy" and boundary.cuda:
            self._to_copy(args[0], kwargs)
        result = func(*args, **kwargs)
        self._account(facts, args, kwargs, result, launches=facts.launches and not crosses)
        return result

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> bool:
        """Whether it goes between host and device."""
        boundary = self._boundary
        to_device = boundary.is_device(target)
        if to_device == boundary.is_device(source):
            return False
        host = source if to_device else target
        if to_device and host.dim() == 0 and self.sync_scope.free_value:
            return False  # a Python number: a fill, no copy
        count_copy(
            self.sync_scope, boundary, host, source.numel(), to_device=to_device, blocking=not non_blocking
        )
        return True

    def _to_copy(self, source: torch.Tensor, kwargs: dict[str, Any]) -> None:
        device = kwargs.get("device")
        if device is None or (device.type == "cuda") == source.is_cuda:
            return
        to_device, blocking = device.type == "cuda", not kwargs.get("non_blocking", False)
        if to_device or blocking:
            count_copy(
                self.sync_scope,
                self._boundary,
                source,
                source.numel(),
                to_device=to_device,
                blocking=blocking,
            )
        else:
            # An asynchronous `.to("cpu")` allocates a pinned destination itself.
            self.sync_scope.record(ledger.COPY_TO_HOST)
            self.sync_scope.record(ledger.BYTES_TO_HOST, source.numel() * source.element_size())

    def _account(self, facts: Operation, args: Any, kwargs: Any, result: Any, *, launches: bool) -> None:
        scope, boundary = self.sync_scope, self._boundary
        outputs = list(tensors_in(result if isinstance(result, (list, tuple)) else (result,)))
        inputs = [*tensors_in(args), *tensors_in(kwargs.values())]
        on_device = False
        host_inputs = False
        for tensor in inputs:
            if boundary.is_device(tensor):
                on_device = True
            elif tensor.dim() > 0:
                host_inputs = True
        if scope.placing is not None:
            on_device = scope.placing == "device"
        elif not inputs:
            on_device = (
                any(map(boundary.is_device, outputs))
                if boundary.cuda
                else scope.on_device or not boundary.strict
            )
        elif host_inputs and on_device and not facts.mixes and scope.graph is None:
            # In a graph a host tensor is one that generated code allocated past the dispatcher.
            scope.record("host tensor in a device operation")
        if not on_device:
            for tensor in outputs:
                boundary.place(tensor, False)
            return
        fresh = 0
        if outputs and not facts.view:
            known = {_address(tensor) for tensor in inputs}
            for tensor in outputs:
                if _address(tensor) not in known:
                    fresh += 1
                    boundary.place(tensor, True)
        if (
            scope.quiet
            or scope.graph is not None
            or not (scope.ledger.armed and scope.ledger.work)
            or not (launches or fresh)
        ):
            return
        place = ledger.calling_place()
        if launches:
            scope.record(ledger.OPERATION, 1, place)
        if fresh:
            scope.record(ledger.ALLOCATION, fresh, place)


def _address(tensor: torch.Tensor) -> int:
    storage = storage_of(tensor)
    return id(tensor) if storage is None else storage._cdata
