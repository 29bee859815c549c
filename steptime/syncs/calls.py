"""Python entry points that wait for a device without any operator: wrapped while a scope is open, put back
after.

Each wrapper counts in the calling thread's scope and then calls the real thing. Where the machine has no CUDA
the wrappers of `torch.cuda` count and return, so that a planted `torch.cuda.synchronize()` is found on any
machine. Not seen: a name that was imported before (`from torch.cuda import synchronize`), and whatever C++
waits for by itself."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch.overrides import _get_current_function_mode_stack

from steptime.host_memory import PAGEABLE, mark_host
from steptime.regions import keep_records
from steptime.syncs.scopes import DEVICE, EVENT, current_scope

STREAM, CACHE, QUERY = "stream synchronize", "empty_cache", "device memory query"

_POINTS: tuple[tuple[Any, str, str], ...] = (
    (torch.cuda, "synchronize", DEVICE),
    (torch.cpu, "synchronize", DEVICE),
    (torch.accelerator, "synchronize", DEVICE),
    (torch.cuda.Stream, "synchronize", STREAM),
    (torch.cuda.Event, "synchronize", EVENT),
    (torch.cpu.Event, "synchronize", EVENT),
    (torch.cuda, "empty_cache", CACHE),
    (torch.cuda.memory, "empty_cache", CACHE),
    (torch.cuda, "mem_get_info", QUERY),
    (torch.cuda.memory, "mem_get_info", QUERY),
)

_lock = threading.Lock()
_users = 0
_originals: list[tuple[Any, str, Any]] = []


def _counting(original: Callable[..., Any], kind: str, real: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        scope = current_scope()
        if scope is None:
            return original(*args, **kwargs)
        scope.record(kind)
        if not real:
            return None
        scope.quiet += 1
        try:
            return original(*args, **kwargs)
        finally:
            scope.quiet -= 1

    return call


def _marking(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = original(*args, **kwargs)
        return mark_host(made, PAGEABLE) if current_scope() is not None else made

    return call


def _keeping_mode(original: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's `backward` and `grad` run the engine with the function mode off; hooks must stay under it."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        scope = current_scope()
        if (
            scope is None
            or scope.function_mode is None
            or scope.function_mode in _get_current_function_mode_stack()
        ):
            return original(*args, **kwargs)
        with scope.function_mode:
            return original(*args, **kwargs)

    return call


def _naming_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch groups tensors by device in C++, where the simulated device has no name of its own."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        groups = original(*args, **kwargs)
        scope = current_scope()
        if scope is None or not scope.simulated:
            return groups
        return {
            (_name_of(device, lists), dtype): (lists, places)
            for (device, dtype), (lists, places) in groups.items()
        }

    return call


def _without_modes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Checkpointing compares what it saw in forward (modes off) with what it sees when it computes again
    (modes on)."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return original(*args, **kwargs)

    return call


def _name_of(device: torch.device, lists: Any) -> torch.device:
    first = next((tensor for tensors in lists for tensor in tensors if tensor is not None), None)
    return device if first is None or device.type != "cpu" else first.device


def install() -> None:
    """Wrap the entry points; calls nest."""
    global _users
    with _lock:
        _users += 1
        if _users > 1:
            return
        cuda = torch.cuda.is_available()
        for owner, name, kind in _POINTS:
            original = owner.__dict__.get(name)
            if original is not None:
                real = cuda or owner in (torch.cpu, torch.cpu.Event)
                _replace(owner, name, original, _counting(original, kind, real))
        engine = "_engine_run_backward"
        _replace(
            torch.autograd,
            engine,
            getattr(torch.autograd, engine),
            _keeping_mode(getattr(torch.autograd, engine)),
        )
        group = "_group_tensors_by_device_and_dtype"
        _replace(torch._C, group, getattr(torch._C, group), _naming_device(getattr(torch._C, group)))
        checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
        _replace(checks, "default", checks["default"], _without_modes(checks["default"]))
        for name in ("from_numpy", "frombuffer"):
            _replace(torch, name, getattr(torch, name), _marking(getattr(torch, name)))
        from steptime.syncs.compiled import HOOKS  # The compiler: seconds to import, for counting runs alone.

        keep_records()
        for owner, name, wrapper in HOOKS:
            _replace(owner, name, getattr(owner, name), wrapper(getattr(owner, name)))


def uninstall() -> None:
    """Undo one `install`."""
    global _users
    with _lock:
        _users -= 1
        if _users:
            return
        while _originals:
            owner, name, original = _originals.pop()
            _put(owner, name, original)


def _replace(owner: Any, name: str, original: Any, wrapper: Any) -> None:
    _originals.append((owner, name, original))
    _put(owner, name, wrapper)


def _put(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)
