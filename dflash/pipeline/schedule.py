"""The learning rate: linear warm-up, then a cosine to a share of the peak (DFlash paper, training
details)."""

from __future__ import annotations

import math

from dflash.config import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """Rate of optimizer step `step` (from 0); the first step already learns, the last ends at
    `min_lr_ratio`. Each of `config.legs` ends one such rise and fall, and the next begins."""
    steps = config.steps
    if config.legs:
        start = max((leg for leg in config.legs if leg <= step), default=0)
        end = min((leg for leg in config.legs if leg > step), default=steps)
        step, steps = step - start, end - start
    warmup = max(1, round(config.warmup * steps)) if config.warmup > 0 else 0
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * cosine)
