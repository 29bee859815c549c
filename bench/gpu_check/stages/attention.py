"""Stage: which attention kernel ran."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from bench.gpu_check.stage import Found, Table, rows_of

KINDS: Mapping[str, tuple[str, ...]] = {
    "flex": ("flex_attention", "flex_decoding"),
    "flash": ("flash_fwd", "flash_bwd", "flash_attn", "flashattn"),
    "memory-efficient": ("fmha_cutlass", "efficient_attention", "mem_eff"),
    "cuDNN": ("cudnn_generated_fort_native_sdpa", "cudnn_sdpa", "sdpa_sm"),
    "softmax apart": ("softmax",),
}
"""Parts of kernels' names, by what they are. Those of flex attention are torch's own template names, read and
not seen on a GPU; an unknown name makes the stage red, with the names of the longest kernels."""
LONGEST = 12


class AttentionStage:
    """A step of the default drafter under torch's profiler."""

    name = "attention"
    asks = "Which attention kernel ran in the drafter's step: flex attention, compiled, forward and backward?"
    seconds = 35

    def look(self) -> Found:
        import torch
        from torch.profiler import ProfilerActivity, profile

        from bench.gpu_check.workload import SHAPE
        from bench.peers.speed import make_step

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step, _ = make_step(SHAPE, "cuda:0")
            for _ in range(2):
                step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
            step()
            torch.cuda.synchronize()
        times: dict[str, float] = {}
        for event in profiled.events() or ():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                times[event.name] = times.get(event.name, 0.0) + float(event.self_device_time_total)
        return read(times, [str(one.message) for one in caught])


def kind_of(kernel: str) -> str:
    """What kind of attention a kernel belongs to; empty: none that is known."""
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "")


def read(times_us: Mapping[str, float], warned: list[str]) -> Found:
    """What kernels say, with their microseconds. Pure."""
    by_kind: dict[str, list[str]] = {}
    for name in times_us:
        if kind := kind_of(name):
            by_kind.setdefault(kind, []).append(name)
    flex = by_kind.get("flex", [])
    problems = []
    if not any("backward" not in name for name in flex):
        problems.append("no forward kernel of flex attention ran")
    if not any("backward" in name for name in flex):
        problems.append("no backward kernel of flex attention ran")
    problems += [f"torch warned: {text.splitlines()[0]}" for text in warned if "flex_attention" in text]
    notes = [f"{kind}: {', '.join(sorted(names))[:300]}" for kind, names in by_kind.items()]
    longest = sorted(times_us.items(), key=lambda item: -item[1])[:LONGEST]
    rows = rows_of(*((name[:90], kind_of(name) or "-", f"{time_us:.0f}") for name, time_us in longest))
    table = Table("The longest kernels", ("kernel", "attention", "us"), rows)
    return Found(len(times_us), "kernels", tuple(problems), tuple(notes), (table,))
