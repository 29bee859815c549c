"""`sim:K`: a simulated device with CUDA's rules, computed on the CPU. The rules are `steptime.simulate`'s."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from dflash.device import Device
from steptime import simulate
from steptime.errors import UserError


class SimulatedDevice(Device):
    """Device K of the simulation that is open in this process.

    Raises:
        UserError: none is open.
    """

    asynchronous = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        simulation = simulate.current()
        if simulation is None:
            raise UserError(
                f"device {name!r}: no simulation is open; run it through dflash.device.simulating"
            )
        self.simulation = simulation
        self.index = int(name.partition(":")[2] or 0)
        self.torch = torch.device("cpu", self.index)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        if self.stream is None:
            self.stream = self.simulation.stream(self.index)
        with simulate.entered(self.simulation), self.stream.active():
            yield

    def event(self, timing: bool = False) -> Any:
        return self.simulation.event(timing)

    def synchronize(self) -> None:
        self.simulation.synchronize(self.index)
