"""Stage: what share of the GPU's own matmul rate the drafter's step uses."""

from __future__ import annotations

import warnings
from statistics import median
from typing import Any

from bench.gpu_check.stage import Found, Table, rows_of

STEPS = 9


class MfuStage:
    """FLOPs of a step's matrix products, by its median time, over the best measured rate of one product."""

    name = "mfu"
    asks = "What share of the matmul rate that this GPU reaches by itself does the drafter's step use?"
    seconds = 25

    def look(self) -> Found:
        import torch

        from bench.gpu_check.workload import SHAPE
        from bench.peers.speed import in_turns, make_step
        from dflash.device.rate import SIZES, matmul_rate

        warnings.filterwarnings("ignore")
        rates = {size: matmul_rate(size, SHAPE.torch_dtype, "cuda:0") for size in SIZES["cuda"]}
        step, _ = make_step(SHAPE, "cuda:0")
        for _ in range(3):
            step()
        seconds = in_turns({"ours": step}, STEPS, torch.cuda.synchronize)["ours"]
        return read(rates, step_flops(SHAPE), median(seconds))


def step_flops(shape: Any) -> int:
    """What one step asks of the drafter (`dflash.models.flops`)."""
    from bench.peers.speed import drafter_shape
    from dflash.models.flops import drafter_flops, full_batch

    drafter = drafter_shape(shape)
    return drafter_flops(drafter).of(full_batch(drafter, shape.batch, shape.context, shape.anchors))


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
