"""What a run's closing lines and its summary.json say of where the time went: pure functions of the whole
run's values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dflash.observe.metric import drafters_rate
from dflash.observe.roles import RoleMap
from steptime.host_time import HeldShare


@dataclass(frozen=True)
class Closing:
    """Of a whole run.

    Attributes:
        lines: for the terminal.
        figures: for summary.json.
    """

    lines: tuple[str, ...] = ()
    figures: dict[str, float | str | None] = field(default_factory=dict)


NOTHING = Closing()
"""Where nobody observed."""


def closing(bottleneck: str, values: Mapping[str, float], roles: RoleMap) -> Closing:
    """From what the observer's summary has; a figure that was not measured has no line.

    Args:
        bottleneck: in words, as in `Summary`.
        values: every key over the whole run.
    """
    figures: dict[str, float | str | None] = {"bottleneck": bottleneck}
    figures |= {name: values.get(f"{side}/mfu") for name, side in _SHARES.items()}
    figures["matmul_flops_per_second"] = roles.rate() or None
    figures |= host_figures(values)
    lines = [bottleneck, mfu_line(values, roles), lock_line(values, len(roles.targets) + len(roles.drafters))]
    return Closing(tuple(line for line in lines if line), figures)


_SHARES = {"mfu": "train", "target_mfu": "target", "drafter_mfu": "drafter"}


def mfu_line(values: Mapping[str, float], roles: RoleMap) -> str:
    """`MFU 31.2% of 105.0 GFLOP/s, this machine's own matmul rate (targets 10.1%, drafters 21.1%)`."""
    share = values.get("train/mfu")
    if share is None:
        return ""
    sides = ", ".join(
        f"{role}s {values[f'{role}/mfu']:.1%}" for role in ("target", "drafter") if f"{role}/mfu" in values
    )
    return f"MFU {share:.1%} of {flops_text(roles.rate())}/s, this machine's own matmul rate ({sides})"


def host_figures(values: Mapping[str, float]) -> dict[str, float | str | None]:
    """What a batch takes of a worker's host thread, and what the interpreter lock allows."""
    figures: dict[str, float | str | None] = {
        f"{role}_host_s_per_batch": _per_batch(values, role, "host_s") for role in ("target", "drafter")
    }
    found = lock_found(values)
    figures["lock_held"] = found.share if found else None
    figures["lock_held_95"] = "{:.3f} to {:.3f}".format(*found.bounds) if found else None
    figures["lock_tokens_per_second"] = (
        (drafters_rate(values) or 0.0) / found.share if found and found.held else None
    )
    return figures


def lock_found(values: Mapping[str, float]) -> HeldShare | None:
    """The looks at the interpreter lock of a whole run."""
    wakes = round(values.get("host/lock_wakes", 0.0))
    return HeldShare(round(values["host/lock_held_ratio"] * wakes), wakes) if wakes else None


def lock_line(values: Mapping[str, float], workers: int) -> str:
    """What the interpreter lock allows. A token takes as much of it whatever the number of workers, and there
    is one lock: tokens per second over the share held is its bound for any number, eight or those there are.

    `interpreter lock held 23% of the time (18 to 29%): at 8 workers it allows at most 41,000 tok/s`"""
    found, rate = lock_found(values), drafters_rate(values)
    if found is None or not rate:
        return ""
    low, high = found.bounds
    bound = f"at most {rate / found.share:,.0f} tok/s" if found.held else f"{rate / high:,.0f} tok/s or more"
    return (
        f"interpreter lock held {found.share:.0%} of the time ({low:.0%} to {high:.0%}): "
        f"at {max(_WORKERS, workers)} workers it allows {bound}"
    )


_WORKERS = 8


def _per_batch(values: Mapping[str, float], role: str, name: str) -> float | None:
    """`name` of all workers of a role over their batches; None where it was not measured."""
    batches, total = (
        sum(value for key, value in values.items() if key.startswith(f"{role}/") and key.endswith(f"/{one}"))
        for one in ("batches", name)
    )
    return total / batches if batches and total else None


def flops_text(flops: float) -> str:
    """`105 GFLOP`, `1.2 TFLOP`: three digits and a unit."""
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if flops >= size:
            return f"{flops / size:.3g} {unit}"
    return f"{flops / 1e6:.3g} MFLOP"
