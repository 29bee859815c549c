"""Pinned reference workloads, run before and after a measurement: when one moves, the machine did, and not
the code.

The CPU and each GPU have one of their own, timed apart: in one sum a GPU's few milliseconds would vanish
beside the CPU's."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

MOVED_PERCENT = 5.0
"""A sentinel that moved by more makes a comparison with a stored figure invalid."""
BLOCK = bytes(1 << 20)
BLOCKS = 24
PRODUCTS = 8
REPEATS = 9


@dataclass(frozen=True, slots=True)
class Sentinel:
    """Seconds that each workload took before and after, by the name of its device."""

    before_s: Mapping[str, float]
    after_s: Mapping[str, float]

    @classmethod
    def of_receipt(cls, tree: Mapping[str, Mapping[str, float] | float]) -> Sentinel:
        """As a receipt keeps it; older ones have one time for all devices together."""
        before, after = (tree[key] for key in ("before_s", "after_s"))
        return cls(
            {"together": before} if isinstance(before, float) else dict(before),  # type: ignore[arg-type]
            {"together": after} if isinstance(after, float) else dict(after),  # type: ignore[arg-type]
        )

    def as_receipt(self) -> dict[str, dict[str, float]]:
        """Plain values, for a receipt."""
        return {"before_s": dict(self.before_s), "after_s": dict(self.after_s)}

    def change_percent(self) -> dict[str, float]:
        """How much slower (positive) each one was afterwards."""
        return {name: 100.0 * (self.after_s[name] / self.before_s[name] - 1.0) for name in self.before_s}

    def moved(self) -> str:
        """Why stored figures must not be judged, or an empty string."""
        moved = {
            name: change for name, change in self.change_percent().items() if abs(change) > MOVED_PERCENT
        }
        if not moved:
            return ""
        changes = ", ".join(f"{name} by {change:+.1f}%" for name, change in moved.items())
        return f"the sentinel workload moved while measuring ({changes}): the machine did not stand still"


def run_sentinel(devices: Sequence[str] = ()) -> dict[str, float]:
    """Median seconds of a fixed piece of work by device: hashing on the CPU, matrix products on each CUDA
    device."""
    works = make_works(devices)
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(REPEATS):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - start)
    return {name: median(found) for name, found in times.items()}


def make_works(devices: Sequence[str]) -> dict[str, Callable[[], None]]:
    """The fixed work of the CPU and of each CUDA device, warm."""
    cuda = [name for name in dict.fromkeys(devices) if name.startswith("cuda")]
    return {"cpu": _hash, **{name: _products(name) for name in cuda}}


def _hash() -> None:
    for _ in range(BLOCKS):
        hashlib.sha256(BLOCK)


def _products(name: str) -> Callable[[], None]:
    import torch

    device = torch.device(name)
    left = torch.ones(2048, 2048, device=device)

    def multiply() -> None:
        for _ in range(PRODUCTS):
            torch.mm(left, left)
        torch.cuda.synchronize(device)

    multiply()
    return multiply
