"""What a run's closing lines and its summary.json say of where the time went: pure functions of the whole
run's values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dflash.observe.roles import RoleMap


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
    lines = [bottleneck, mfu_line(values, roles)]
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


def flops_text(flops: float) -> str:
    """`105 GFLOP`, `1.2 TFLOP`: three digits and a unit."""
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if flops >= size:
            return f"{flops / size:.3g} {unit}"
    return f"{flops / 1e6:.3g} MFLOP"
