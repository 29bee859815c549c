"""A pinned reference workload, run before and after a measurement: when it moves, the machine did, and not
the code."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MOVED_PERCENT = 5.0
"""A sentinel that moved by more makes a comparison with a stored figure invalid."""
BLOCK = bytes(1 << 20)
BLOCKS = 24
REPEATS = 9


@dataclass(frozen=True, slots=True)
class Sentinel:
    """Seconds that the workload took before and after."""

    before_s: float
    after_s: float

    @property
    def change_percent(self) -> float:
        """How much slower (positive) it was afterwards."""
        return 100.0 * (self.after_s / self.before_s - 1.0)

    def moved(self) -> str:
        """Why stored figures must not be judged, or an empty string."""
        if abs(self.change_percent) <= MOVED_PERCENT:
            return ""
        return (
            f"the sentinel workload moved by {self.change_percent:+.1f}% while measuring: the machine did "
            "not stand still"
        )


def run_sentinel(devices: Sequence[str] = ()) -> float:
    """Median seconds of a fixed piece of work: hashing on the CPU, and a fixed matrix product on each CUDA
    device."""
    times = []
    products = [_product(name) for name in dict.fromkeys(devices) if name.startswith("cuda")]
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(BLOCKS):
            hashlib.sha256(BLOCK)
        for product in products:
            product()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def _product(name: str) -> Callable[[], None]:
    import torch

    device = torch.device(name)
    left = torch.ones(2048, 2048, device=device)
    torch.mm(left, left)

    def multiply() -> None:
        for _ in range(8):
            torch.mm(left, left)
        torch.cuda.synchronize(device)

    return multiply
