"""Way: PyTorch's GPU trace hooks. They call Python in the thread that waits, before it waits.

Activation cannot be undone, so arm it only in a process made for counting. The hooks are private to PyTorch:
when they are not there, this way is unavailable, and nothing else stands in for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from steptime.counting.difference import Counts
from steptime.counting.ways.way import Notes, carried, required
from steptime.syncs.scopes import Scope

DEVICE, STREAM, EVENT = "device sync", "stream sync", "event sync"
BLOCK, RECORD, CREATION = "allocator block", "event record", "event creation"
SYNCS = frozenset({DEVICE, STREAM, EVENT})

_HOOKS = {
    "register_callback_for_device_synchronization": DEVICE,
    "register_callback_for_stream_synchronization": STREAM,
    "register_callback_for_event_synchronization": EVENT,
    "register_callback_for_memory_allocation": BLOCK,
    "register_callback_for_event_record": RECORD,
    "register_callback_for_event_creation": CREATION,
}


class GpuTraceWay:
    """One for each process; `attach` once, then `arm` or the scopes of a trainer say who did what."""

    name = "GPU trace"
    sees = (
        "device, stream and event synchronisation of PyTorch, whoever asks for it, in the thread that waits "
        "and in backward; blocks of the caching allocator, events created and recorded"
    )
    does_not_see = (
        "asynchronous copies on pageable memory, the driver's allocations and frees, empty_cache, kernels of "
        "other libraries"
    )
    every_step = True
    claims = frozenset(
        {
            "item",
            "device_sync",
            "event_sync",
            "mask_read",
            "device_alloc",
            "backward_sync",
            "monitor_sync",
            "flush_sync",
        }
    )
    device = "cuda"

    def __init__(self) -> None:
        self.notes = Notes()
        self._attached = False

    def available(self) -> str | None:
        if not torch.cuda.is_available():
            return "no CUDA device"
        return missing_hooks()

    def attach(self) -> None:
        """Register the callbacks and activate the trace, for the rest of the process.

        Raises:
            Unavailable: no CUDA device, or this torch has no such hooks.
        """
        if self._attached:
            return
        required(self)
        self.register()
        torch._C._activate_gpu_trace()  # type: ignore[attr-defined]
        self._attached = True

    def register(self) -> None:
        """The callbacks alone."""
        from torch.cuda import _gpu_trace

        for hook, kind in _HOOKS.items():
            getattr(_gpu_trace, hook)(self._noting(kind))

    def _noting(self, kind: str) -> Callable[..., None]:
        def note(*arguments: Any) -> None:
            self.notes.note(kind)

        return note

    def arm(self, role: str) -> AbstractContextManager[object]:
        return self._armed(role)

    @contextlib.contextmanager
    def _armed(self, role: str) -> Iterator[Scope]:
        self.attach()
        with carried(role) as scope:
            yield scope

    def counts(self) -> Counts:
        return self.notes.summed()


def missing_hooks() -> str | None:
    """What this build of torch lacks, or None."""
    try:
        from torch.cuda import _gpu_trace
    except ImportError:
        return f"torch {torch.__version__} has no torch.cuda._gpu_trace"
    lacking = [hook for hook in _HOOKS if not hasattr(_gpu_trace, hook)]
    if lacking:
        return f"torch {torch.__version__} has no torch.cuda._gpu_trace.{lacking[0]}"
    if not hasattr(torch._C, "_activate_gpu_trace"):
        return f"torch {torch.__version__} has no torch._C._activate_gpu_trace"
    return None
