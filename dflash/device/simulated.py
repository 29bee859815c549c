"""`sim:N`: a simulated device with CUDA's rules, computed on the CPU. The rules are `steptime.simulate`'s."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from dflash.device.base import Device
from steptime import simulate


class SimulatedDevice(Device):
    """Device N of the simulation that is open in this process (`simulating`)."""

    asynchronous = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        simulation = simulate.current()
        if simulation is None:
            raise RuntimeError(f"device {name!r}: no simulation is open")
        self.simulation = simulation
        self.torch = torch.device("cpu", self.index)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with simulate.entered(self.simulation), super().active():
            yield

    def new_stream(self) -> simulate.Stream:
        return self.simulation.stream(self.index)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        active: AbstractContextManager[object] = stream.active()
        return active

    def event(self, timing: bool = False) -> Any:
        return self.simulation.event(timing)

    def synchronize(self) -> None:
        self.simulation.synchronize(self.index)

    def reaches(self, other: Device) -> bool:
        return isinstance(other, SimulatedDevice)


@contextlib.contextmanager
def simulating(names: Iterable[str], seed: int | None = None) -> Iterator[simulate.Simulation | None]:
    """Open a simulation when any of the devices is simulated, around building and running what uses them.

    Args:
        seed: of small delays at hand-overs; None for none.
    """
    if any(name.startswith("sim") for name in names) and simulate.current() is None:
        with simulate.Simulation(seed=seed).open() as simulation:
            yield simulation
    else:
        yield simulate.current()
