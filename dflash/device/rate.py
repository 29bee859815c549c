"""How fast this machine multiplies matrices: what a share of it (MFU) is a share of. It waits for the device:
before the workers start."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch

from dflash.device.base import Device

REPEATS = 10
SIZES = {"cuda": (4096, 8192), "cpu": (256, 512, 1024)}
"""Square products by kind of device, ascending: the larger ones are faster, and take a CPU longer."""
LONG_S = 0.5
"""Nobody waits longer for a product: a CPU without bfloat16 instructions takes a minute for a large one."""


def matmul_rate(size: int, dtype: torch.dtype, device: str) -> float:
    """FLOPs per second of a square product, the best of some."""
    place = Device(device)
    left = torch.randn(size, size, device=place.torch).to(dtype)
    torch.mm(left, left)
    best, spent = 0.0, 0.0
    for _ in range(REPEATS):
        place.synchronize()  # sync: ok, no worker runs yet
        began = time.perf_counter()
        torch.mm(left, left)
        place.synchronize()  # sync: ok, no worker runs yet
        seconds = time.perf_counter() - began
        best, spent = max(best, 2.0 * size**3 / seconds), spent + seconds
        if spent > LONG_S:
            break
    return best


def hardware(name: str) -> str:
    """The device behind a worker's: `cpu:1` and `cpu:2` are one CPU."""
    kind, _, index = name.partition(":")
    return f"{kind}:{index or 0}" if kind == "cuda" else kind


def matmul_rates(names: Sequence[str], dtype: torch.dtype, threads: int) -> tuple[tuple[str, float], ...]:
    """FLOPs per second of each piece of hardware that some workers have, by `hardware`; the best of a few
    sizes. A simulated device has none, nor has a GPU that is not here.

    Args:
        threads: CPU threads of all workers together.
    """
    found = []
    for name in dict.fromkeys(map(hardware, names)):
        kind, _, index = name.partition(":")
        if kind not in SIZES or (kind == "cuda" and int(index) >= torch.cuda.device_count()):
            continue
        before = torch.get_num_threads()
        torch.set_num_threads(max(1, min(threads, os.cpu_count() or 1)))
        try:
            found.append((name, _best_rate(name, SIZES[kind], dtype)))
        finally:
            torch.set_num_threads(before)
    return tuple(found)


def _best_rate(name: str, sizes: Sequence[int], dtype: torch.dtype) -> float:
    best = 0.0
    for size in sizes:
        if best and 2.0 * size**3 / best > LONG_S:
            break
        best = max(best, matmul_rate(size, dtype, name))
    return best
