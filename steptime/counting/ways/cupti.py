"""Way: CUPTI, the driver's own account, as a cross-check in a process of its own.

CUPTI takes one subscriber per process, so never beside torch.profiler, nsys or DCGM profiling. It sees what
any library waits for, PyTorch's allocator and Triton included, in the thread that calls the driver."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from steptime.counting.difference import Counts
from steptime.counting.ways.way import Notes, Unavailable, carried, required
from steptime.syncs.scopes import Scope

SYNCS = {
    "cuCtxSynchronize": "context synchronize",
    "cuCtxSynchronize_v2": "context synchronize",
    "cuStreamSynchronize": "stream synchronize",
    "cuStreamSynchronize_ptsz": "stream synchronize",
    "cuEventSynchronize": "event synchronize",
}
OTHERS = {
    "cuMemAlloc_v2": "device malloc",
    "cuMemFree_v2": "device free",
    "cuMemMap": "device map",
    "cuMemUnmap": "device unmap",
    "cuMemHostAlloc": "pinned malloc",
    "cuMemcpyDtoHAsync_v2": "copy to host",
    "cuMemcpyDtoHAsync_v2_ptsz": "copy to host",
    "cuMemcpyHtoDAsync_v2": "copy to device",
    "cuMemcpyHtoDAsync_v2_ptsz": "copy to device",
    "cuLaunchKernel": "kernel",
    "cuLaunchKernel_ptsz": "kernel",
    "cuLaunchKernelEx": "kernel",
    "cuLaunchKernelEx_ptsz": "kernel",
}


class CuptiWay:
    """Subscribes to the driver's calls once."""

    name = "CUPTI"
    sees = "every synchronise, copy, kernel launch and memory call to the driver, whichever library makes it"
    does_not_see = (
        "why: blocking copies show as a copy and a stream synchronise; pageable copies as copies alone"
    )
    every_step = True
    claims = frozenset(
        {
            "item",
            "device_sync",
            "event_sync",
            "mask_read",
            "empty_cache",
            "extra_kernel",
            "device_alloc",
            "backward_sync",
            "monitor_sync",
            "flush_sync",
        }
    )
    device = "cuda"

    def __init__(self) -> None:
        self.notes = Notes()
        self._subscriber: Any = None
        self._kinds: dict[int, str] = {}

    def available(self) -> str | None:
        if importlib.util.find_spec("cupti") is None:
            return "cupti-python is not installed (pip install 'dflash-harness[cupti]')"
        return None if torch.cuda.is_available() else "no CUDA device"

    def attach(self) -> None:
        """Subscribe, for the rest of the process.

        Raises:
            Unavailable: no package, no device, or another subscriber (a profiler) was first.
        """
        if self._subscriber is not None:
            return
        required(self)
        from cupti import cupti

        cbids = cupti.DriverApiTraceCbid
        self._enter = int(cupti.ApiCallbackSite.API_ENTER)
        try:
            self._subscriber = cupti.subscribe(self._called, None)
        except Exception as error:  # cupti raises its own type, which differs between versions
            raise Unavailable(f"{self.name}: unavailable: {error}") from None
        for name, kind in {**SYNCS, **OTHERS}.items():
            if hasattr(cbids, name):
                cbid = int(getattr(cbids, name))
                self._kinds[cbid] = kind
                cupti.enable_callback(1, self._subscriber, int(cupti.CallbackDomain.DRIVER_API), cbid)

    def _called(self, user_data: Any, domain: int, cbid: int, data: Any) -> None:
        if data.callback_site == self._enter and (kind := self._kinds.get(int(cbid))) is not None:
            self.notes.note(kind)

    def arm(self, role: str) -> AbstractContextManager[object]:
        return self._armed(role)

    @contextlib.contextmanager
    def _armed(self, role: str) -> Iterator[Scope]:
        self.attach()
        with carried(role) as scope:
            yield scope

    def counts(self) -> Counts:
        return self.notes.summed()
