"""What bfloat16 costs in accuracy: gradients of several micro-batches, and the loss over many steps.

    python -m bench.peers.precision [--steps N] [--json FILE]

Gradients of M micro-batches are added in bfloat16, and in float32 and rounded once (as training does), and
held against their exact sum; the distance is that of the whole vector, relative to it. The losses
are those of one batch learnt by heart, float32 and bfloat16 from the same weights and anchors."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tabulate import tabulate

from bench.peers.speed import Shape, make_step

SHAPE = Shape(64, 128, 2, 2, 1, 32, 256, 1, 96, 8, 8, 2)
MICRO_BATCHES = (1, 2, 4, 8, 16)


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Length of the difference over the length of the exact one."""
    return float(torch.linalg.vector_norm(found.double() - exact.double()) / exact.double().norm())


def sums(gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """bfloat16 gradients added in bfloat16, and in float32 and rounded once."""
    narrow, wide = torch.zeros_like(gradients[0]), torch.zeros_like(gradients[0], dtype=torch.float32)
    for gradient in gradients:
        narrow.add_(gradient)
        wide.add_(gradient)
    return narrow, wide.to(gradients[0].dtype)


def losses(dtype: str, steps: int) -> list[float]:
    """Losses of the step of `SHAPE`, which draws the same anchors in either type."""
    torch.manual_seed(0)
    step, _ = make_step(replace(SHAPE, dtype=dtype))
    return [float(step()) for _ in range(steps)]


def accumulated(seed: int = 0) -> list[tuple[int, float, float]]:
    """For each number of micro-batches, the distance of the bfloat16 sum and of the float32 one from the
    exact sum of the same bfloat16 gradients. The gradients share a mean, as those of one model do."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(1 << 16, generator=generator)
    found = []
    for count in MICRO_BATCHES:
        parts = [(mean + torch.randn(1 << 16, generator=generator)).bfloat16() for _ in range(count)]
        exact = torch.stack(parts).double().sum(dim=0)
        narrow, wide = sums(parts)
        found.append((count, distance(narrow, exact), distance(wide, exact)))
    return found


def _means(curve: Sequence[float], size: int) -> list[float]:
    return [float(np.mean(curve[first : first + size])) for first in range(0, len(curve), size)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers.precision", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the losses")
    options = parser.parse_args(argv)
    rows = [(count, f"{narrow:.2%}", f"{wide:.2%}") for count, narrow, wide in accumulated()]
    headers = ("micro-batches", "added in bfloat16", "added in float32, rounded once")
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))
    curves = {dtype: losses(dtype, options.steps) for dtype in ("fp32", "bf16")}
    tenth = max(1, options.steps // 10)
    means = {dtype: _means(curve, tenth) for dtype, curve in curves.items()}
    body = [
        (f"{(i + 1) * tenth}", f"{a:.4f}", f"{b:.4f}", f"{b / a - 1.0:+.2%}")
        for i, (a, b) in enumerate(zip(means["fp32"], means["bf16"], strict=True))
    ]
    columns = ("up to step", "float32 loss", "bfloat16 loss", "difference")
    print(tabulate(body, headers=columns, tablefmt="github", disable_numparse=True))
    if options.json:
        options.json.write_text(json.dumps({"schema": "dflash-precision/1", **curves}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
