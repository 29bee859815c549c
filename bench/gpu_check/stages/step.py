"""Stage: our drafter's step beside the same drafter through `torch.compile`, and beside SpecForge's."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping
from statistics import median, quantiles
from typing import Any

from bench.gpu_check.stage import Found, Table, rows_of

ROUNDS, WARMUP = 9, 3
OURS, COMPILED, SPECFORGE = "ours", "torch.compile", "SpecForge"


class StepStage:
    """Forward, loss, backward, clip and optimizer, in turns inside each round."""

    name = "step"
    asks = "How fast is the drafter's step beside torch.compile of the same drafter, and beside SpecForge's?"
    seconds = 75

    def look(self) -> Found:
        import torch

        from bench.gpu_check.workload import SHAPE

        warnings.filterwarnings("ignore")
        steps, problems, notes = make_steps(makers(SHAPE, "cuda:0"))
        if importlib.util.find_spec("specforge") is None:
            notes.append("SpecForge is not installed: not asked for (nox -s peers says how)")
        from bench.peers.speed import in_turns

        seconds = in_turns(steps, ROUNDS, torch.cuda.synchronize) if steps else {}
        return read(seconds, SHAPE.batch * SHAPE.context, problems, notes)


Makers = Mapping[str, Callable[[], tuple[Callable[[], Any], int]]]


def makers(shape: Any, device: str) -> Makers:
    """What makes each trainer's step. SpecForge's is there where it is installed."""
    from bench.peers import speed

    found: dict[str, Callable[[], tuple[Callable[[], Any], int]]] = {
        OURS: lambda: speed.make_step(shape, device),
        COMPILED: lambda: speed.make_step(shape, device, compiled="inductor"),
    }
    if importlib.util.find_spec("specforge") is not None:
        found[SPECFORGE] = lambda: speed.specforge_step(shape, device, "flex_attention")
    return found


def make_steps(made: Makers) -> tuple[dict[str, Callable[[], Any]], list[str], list[str]]:
    """Each step, warm; and a line for each that cannot be made or run."""
    steps, problems, notes = {}, [], []
    for name, make in made.items():
        try:
            step, parameters = make()
            for _ in range(WARMUP):
                step()
        except Exception as error:  # any tool's own; the others are still worth comparing
            line = (str(error).strip().splitlines() or [""])[0]
            problems.append(f"{name}: cannot run: {type(error).__name__}: {line[:200]}")
            continue
        steps[name] = step
        notes.append(f"{name}: {parameters / 1e6:.1f} M parameters")
    return steps, problems, notes


def read(seconds: Mapping[str, list[float]], tokens: int, problems: list[str], notes: list[str]) -> Found:
    """What the times say. Pure. A slower step is a figure, and no problem of the check."""
    rows = []
    for name, times in seconds.items():
        ratio = ""
        if name != OURS and OURS in seconds:
            ratios = [other / own for other, own in zip(times, seconds[OURS], strict=True)]
            low, middle, high = quantiles(ratios, n=4)
            ratio = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        rows.append((name, f"{median(times) * 1e3:.2f}", f"{tokens / median(times):,.0f}", ratio))
    missing = [name for name in (OURS, COMPILED) if name not in seconds]
    told = [line.partition(":")[0] for line in problems]
    problems = problems + [f"{name}: was not timed" for name in missing if name not in told]
    headers = ("trainer", "ms a step", "context tok/s", "its time / ours (quartiles)")
    table = Table("Steps in turns", headers, rows_of(*rows))
    return Found(sum(map(len, seconds.values())), "steps", tuple(problems), tuple(notes), (table,))
