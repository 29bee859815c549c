"""Threads of a small simulated program."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from steptime.simulate import Simulation, entered
from tests.waiting import HANG_S

CPU_0, CPU_1 = torch.device("cpu", 0), torch.device("cpu", 1)


def settled(simulation: Simulation, *shape: int, device: int = 0) -> torch.Tensor:
    """Zeros that everybody may use: the host has waited for them."""
    made = torch.zeros(*shape, device=torch.device("cpu", device))
    simulation.synchronize(device)
    return made


def untraced() -> Any:
    """A lock, taken, that the simulation does not see: it fixes the order on the clock and hands nothing
    over."""
    lock = threading._allocate_lock()  # type: ignore[attr-defined]
    lock.acquire()
    return lock


def run_threads(simulation: Simulation, *bodies: Callable[[], None]) -> None:
    """All at once; raises the first error of any."""
    errors: list[BaseException] = []

    def live(body: Callable[[], None]) -> None:
        try:
            with entered(simulation):
                body()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=live, args=(body,), name=f"worker/{number}", daemon=True)
        for number, body in enumerate(bodies)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
