"""Stage: what share of the GPU's own matmul rate the drafter's step uses."""

from __future__ import annotations

import warnings
from statistics import median
from typing import Any

from bench.gpu_check.stage import Found, Table, rows_of

SIZES = (4096, 8192)
REPEATS, STEPS = 10, 9


class MfuStage:
    """FLOPs of a step's matrix products, by its median time, over the best measured rate of one product."""

    name = "mfu"
    asks = "What share of the matmul rate that this GPU reaches by itself does the drafter's step use?"
    seconds = 25

    def look(self) -> Found:
        import torch

        from bench.gpu_check.workload import SHAPE
        from bench.peers.speed import in_turns, make_step

        warnings.filterwarnings("ignore")
        rates = {size: matmul_rate(size, SHAPE.torch_dtype, "cuda:0") for size in SIZES}
        step, _ = make_step(SHAPE, "cuda:0")
        for _ in range(3):
            step()
        seconds = in_turns({"ours": step}, STEPS, torch.cuda.synchronize)["ours"]
        return read(rates, products(SHAPE) + attention(SHAPE), median(seconds))


def matmul_rate(size: int, dtype: Any, device: str) -> float:
    """FLOPs per second of a square product, the best of some."""
    import time

    import torch

    left = torch.randn(size, size, device=device).to(dtype)
    wait = torch.cuda.synchronize if left.is_cuda else lambda: None
    torch.mm(left, left)
    best = 0.0
    for _ in range(REPEATS):
        wait()
        began = time.perf_counter()
        torch.mm(left, left)
        wait()
        best = max(best, 2.0 * size**3 / (time.perf_counter() - began))
    return best


def products(shape: Any) -> int:
    """FLOPs of the matrix products with weights that one step asks for: forward, and backward for inputs and
    weights. The target's head is frozen and what it taps needs no gradient, so these have one product less.
    What our pass saves (rows of the first layer that are equal) is not taken off."""
    rows, context = shape.batch * shape.anchors * shape.block, shape.batch * shape.context
    heads, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = rows * shape.hidden * (2 * heads + 3 * shape.intermediate)
    layer += (rows + context) * shape.hidden * 2 * kv
    taps = context * shape.taps * shape.hidden * shape.hidden
    head = shape.batch * shape.anchors * (shape.block - 1) * shape.hidden * shape.vocab
    return 2 * (3 * shape.layers * layer + 2 * taps + 2 * head)


def attention(shape: Any) -> int:
    """FLOPs of attention in one step: of what slots see, half of the context on average and their own block.
    Backward is twice the forward; what a kernel computes again is no work that was asked for."""
    rows, seen = shape.batch * shape.anchors * shape.block, shape.context // 2 + shape.block
    return 3 * shape.layers * 4 * rows * seen * shape.heads * shape.head_dim


def read(rates: dict[int, float], flops: int, seconds: float) -> Found:
    """The share. Pure."""
    best = max(rates.values(), default=0.0)
    problems = []
    if not flops:
        problems.append("no FLOP of the step was counted")
    if not best:
        problems.append("the matmul rate was not measured")
    share = flops / seconds / best if best and seconds else 0.0
    if share > 1.0:
        problems.append(f"a share of {share:.0%} cannot be: FLOPs or times are wrong")
    rows = [(f"product of {size}", f"{rate / 1e12:.1f}") for size, rate in rates.items()]
    rows.append(("the step", f"{flops / seconds / 1e12:.1f}" if seconds else "-"))
    notes = (f"MFU {share:.1%} ({flops / 1e12:.3f} TFLOP in {seconds * 1e3:.2f} ms)",)
    table = Table("Rates", ("what", "TFLOP/s"), rows_of(*rows))
    return Found(flops, "FLOPs", tuple(problems), notes, (table,))
