"""NVML, opened for a moment; None where there is none. Each value is given up separately."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def opened(stand_in: ModuleType | Any | None) -> Iterator[Any | None]:
    """NVML ready to be asked, or None where there is none."""
    api: Any = stand_in
    if api is None:
        try:
            api = importlib.import_module("pynvml")
        except ImportError:
            yield None
            return
    try:
        api.nvmlInit()
    except Exception:
        yield None
        return
    try:
        yield api
    finally:
        with contextlib.suppress(Exception):
            api.nvmlShutdown()


def handles(api: Any) -> list[Any]:
    """A handle for each GPU, by index."""
    return [api.nvmlDeviceGetHandleByIndex(index) for index in range(api.nvmlDeviceGetCount())]


def ask(read: Any, *arguments: Any) -> Any:
    """What `read` returns, or None where it raises."""
    with contextlib.suppress(Exception):
        return read(*arguments)
    return None


def as_text(value: bytes | str) -> str:
    """Older drivers' bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value
