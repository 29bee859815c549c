"""What makes a step repeat itself: weights that stand still, and the random numbers of its batch."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

NOTE = (
    "weights stand still: rate and decay of every optimizer are 0 while it steps, and each batch has its own "
    "random numbers, always the same"
)
HELD = ("lr", "weight_decay")


def reset_random(group: int) -> None:
    """The random numbers of a batch, the same each time."""
    torch.manual_seed(group)
    random.seed(group)
    np.random.seed(group)


@contextlib.contextmanager
def weights_held() -> Iterator[None]:
    """Every optimizer does its work with rate and decay 0, and finds its own afterwards, so that a scheduler
    goes on as ever."""
    kept: dict[int, list[dict[str, Any]]] = {}

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        kept[id(optimizer)] = [
            {name: group[name] for name in HELD if name in group} for group in optimizer.param_groups
        ]
        for group in optimizer.param_groups:
            for name in HELD:
                if name in group:
                    value = group[name]
                    group[name] = torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0.0

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, own in zip(optimizer.param_groups, kept.pop(id(optimizer), []), strict=False):
            group.update(own)

    hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
