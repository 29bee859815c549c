"""Where host memory ends and a worker's device begins, and what crosses. The rules in words: `sync_modes`."""

from __future__ import annotations

from typing import Any

import torch

from steptime.host_memory import PAGEABLE, PINNED, host_kind, mark_host
from steptime.syncs import scopes as ledger
from steptime.syncs.rules import is_gapped
from steptime.syncs.scopes import Scope

SIMULATED = torch.device("cpu", 0)


class Boundary:
    """Where tensors live: CUDA's own answer, or the marks of `host_memory` on the CPU.

    Attributes:
        name: what a simulated device tensor's `.device` says.
    """

    name = SIMULATED

    def __init__(self, *, cuda: bool, strict: bool = True) -> None:
        self.cuda, self.strict = cuda, strict

    def is_device(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on a worker's device."""
        if self.cuda:
            return tensor.is_cuda
        return tensor.device.type != "cpu" or host_kind(tensor) is None

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether host memory is pinned."""
        return tensor.is_pinned() if self.cuda else host_kind(tensor) == PINNED

    def modes(self) -> tuple[Any, Any] | None:
        """Classes of its function mode and dispatch mode; None: the usual ones."""
        return None

    def place(self, tensor: torch.Tensor, on_device: bool) -> None:
        """Write down where fresh memory lives, where tensors do not say so themselves."""
        if not (self.cuda or on_device) and host_kind(tensor) is None:
            mark_host(tensor, PAGEABLE)

    def place_result(self, tensor: torch.Tensor) -> None:
        """A compiled function gave it: on a device, where it does not say so itself."""

    def names_device(self, device: torch.device | None) -> bool | None:
        """Whether a `device=` argument means the worker's device; None when it does not say."""
        if device is None:
            return None
        if self.cuda or device.type != "cpu":
            return device.type not in ("cpu", "meta")
        if device.index is not None:
            return True
        return False if self.strict else None


def count_copy(
    scope: Scope, boundary: Boundary, host: torch.Tensor, elements: int, *, to_device: bool, blocking: bool
) -> None:
    """Count a copy between `host` (a tensor in host memory) and the device."""
    if not elements:
        return
    size = elements * host.element_size()
    scope.record(ledger.COPY_TO_DEVICE if to_device else ledger.COPY_TO_HOST)
    scope.record(ledger.BYTES_TO_DEVICE if to_device else ledger.BYTES_TO_HOST, size)
    if blocking:
        scope.record("blocking copy to device" if to_device else "blocking copy to host")
    elif not boundary.is_pinned(host) or is_gapped(host):
        scope.record("pageable copy")
