"""`dtype = "auto"` made a type: bfloat16 where the devices multiply in it at full speed, else float32."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from dflash.config import Config, TargetConfig

_SIZE, _TRIES = 256, 3
_SLOW = 3.0  # a type that takes so many times as long as float32 is worth a word
_said: set[str] = set()


def settle_dtypes(config: Config) -> Config:
    """The config with a type in the place of every `auto`; a choice, and a type that is slow here, is said
    once on stderr."""
    target = _settled("target", config.target.dtype, config.target.devices)
    drafter = _settled("drafter", config.drafter.dtype, config.drafter.devices)
    if (target, drafter) == (config.target.dtype, config.drafter.dtype):
        return config
    return config.model_copy(
        update={
            "target": config.target.model_copy(update={"dtype": target}),
            "drafter": config.drafter.model_copy(update={"dtype": drafter}),
        }
    )


def settle_target(config: TargetConfig, device: str) -> TargetConfig:
    """The same for a target alone."""
    return config.model_copy(update={"dtype": _settled("target", config.dtype, [device])})


def _settled(who: str, dtype: str, devices: Sequence[str]) -> str:
    if dtype == "float32":
        return dtype
    slow = [name for name in devices if not fast_bfloat16(name)]
    if dtype == "auto":
        chosen = "float32" if slow else "bfloat16"
        why = f"{slow[0]} has no bfloat16 units" if slow else f"{devices[0]} has bfloat16 units"
        say_once(f"{who}.dtype = auto: {chosen}, since {why}")
        return chosen
    if slow and not slow[0].startswith("sim"):
        times = bfloat16_cost(slow[0])
        if times > _SLOW:
            say_once(
                f"{who}.dtype = bfloat16: {slow[0]} has no bfloat16 units, a product of matrices takes "
                f"{times:.0f} times as long as in float32; {who}.dtype = auto chooses by the device"
            )
    return dtype


def fast_bfloat16(device: str) -> bool:
    """Whether a device multiplies matrices in bfloat16 at least as fast as in float32: from what torch knows
    of it; a CPU that is no x86 is measured."""
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            return True  # a plan for another machine
        return torch.cuda.is_bf16_supported(including_emulation=False)
    flags: Any = torch.cpu
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512", "DEFAULT", "NO AVX"):
        return bool(flags._is_avx512_bf16_supported() or flags._is_amx_tile_supported())
    return bfloat16_cost(device) < 1.0


def bfloat16_cost(device: str) -> float:
    """Time of a product of matrices in bfloat16 over that in float32; some hundredths of a second."""
    seconds = [_product_s(dtype) for dtype in (torch.bfloat16, torch.float32)]
    return seconds[0] / seconds[1]


def _product_s(dtype: torch.dtype) -> float:
    one = torch.ones(_SIZE, _SIZE, dtype=dtype)
    best = float("inf")
    for _ in range(_TRIES):
        started = time.perf_counter()
        torch.mm(one, one)
        best = min(best, time.perf_counter() - started)
    return best


def say_once(line: str) -> None:
    """A line on stderr, the first time only."""
    if line not in _said:
        _said.add(line)
        sys.stderr.write(f"dflash: {line}\n")
