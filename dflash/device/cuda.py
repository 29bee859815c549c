"""`cuda:N`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from dflash.device.base import Device


class CudaDevice(Device):
    """A CUDA GPU."""

    is_cuda = True
    asynchronous = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.torch = torch.device("cuda", self.index)

    def new_stream(self) -> Any:
        return torch.cuda.Stream(self.torch)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def event(self, timing: bool = False) -> Any:
        return torch.cuda.Event(enable_timing=timing)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch)

    def reaches(self, other: Device) -> bool:
        if self.shares_memory(other):
            return True
        return other.is_cuda and torch.cuda.can_device_access_peer(self.torch, other.torch)
