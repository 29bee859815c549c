"""A small target that means something: the hybrid trained as a language model, on the CPU, in minutes.

Two cores do not share one small matrix well, so each thread takes the gradients of its own rows and they are
added up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from dflash.data.batch import Sample
from dflash.data.progress import Progress
from dflash.models.dtypes import fast_bfloat16


@dataclass(frozen=True)
class Training:
    """How a target is trained.

    Attributes:
        tokens: seen in all; `batch` rows of `length` tokens a step.
        threads: gradients taken at the same time.
    """

    tokens: int
    batch: int = 16
    length: int = 256
    lr: float = 3e-3
    warmup: float = 0.05
    weight_decay: float = 0.1
    seed: int = 0
    threads: int = 2

    @property
    def steps(self) -> int:
        return max(1, self.tokens // (self.batch * self.length))

    def rate(self, step: int) -> float:
        """Rises linearly, then falls along a cosine to a tenth."""
        rising = max(1, round(self.warmup * self.steps))
        if step < rising:
            return self.lr * (step + 1) / rising
        done = (step - rising) / max(1, self.steps - rising)
        return self.lr * (0.1 + 0.45 * (1.0 + math.cos(math.pi * done)))


def rows_of(samples: Sequence[Sample], length: int, seed: int) -> Iterator[np.ndarray]:
    """Endless int64 `[length + 1]` rows: each begins with the beginning of a conversation, others follow
    until it is full."""
    rng = np.random.default_rng(seed)
    parts: list[np.ndarray] = []
    room = length + 1
    while True:
        for index in rng.permutation(len(samples)):
            ids = np.asarray(samples[int(index)].input_ids, np.int64)[:room]
            parts.append(ids)
            room -= len(ids)
            if room == 0:
                yield np.concatenate(parts)
                parts, room = [], length + 1


def batches_of(samples: Sequence[Sample], batch: int, length: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless int64 `[batch, length + 1]`."""
    rows = rows_of(samples, length, seed)
    while True:
        yield torch.from_numpy(np.stack([next(rows) for _ in range(batch)]))


def loss_sum(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Summed cross entropy of predicting every next token of int64 `[rows, n + 1]`, in bfloat16 arithmetic
    where the CPU has units for it."""
    with torch.autocast("cpu", torch.bfloat16, enabled=fast_bfloat16("cpu")):
        hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden)
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def train(
    model: Any, samples: Sequence[Sample], settings: Training, say: Callable[[str], None]
) -> list[float]:
    """Train in place; returns the loss of every step, nats a token."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=True)
    batches = batches_of(samples, settings.batch, settings.length, settings.seed)
    losses: list[float] = []
    began = time.perf_counter()

    def gradients(ids: torch.Tensor) -> tuple[float, tuple[torch.Tensor, ...]]:
        loss = loss_sum(model, ids) / (settings.batch * settings.length)
        return float(loss.detach()), torch.autograd.grad(loss, parameters)

    model.train()
    # torch shares a matrix over threads; here the threads have rows of their own.
    shared = torch.get_num_threads()
    torch.set_num_threads(max(1, shared // settings.threads))
    try:
        with (
            ThreadPoolExecutor(settings.threads) as pool,
            Progress("Training the target", settings.steps, "steps") as progress,
        ):
            for step in range(settings.steps):
                parts = list(pool.map(gradients, next(batches).chunk(settings.threads)))
                for place, parameter in enumerate(parameters):
                    parameter.grad = sum((part[1][place] for part in parts[1:]), parts[0][1][place])
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                for group in optimizer.param_groups:
                    group["lr"] = settings.rate(step)
                optimizer.step()
                losses.append(sum(part[0] for part in parts))
                progress.advance()
    finally:
        torch.set_num_threads(shared)
        model.eval()
    seconds = time.perf_counter() - began
    last = losses[-max(1, len(losses) // 20) :]
    say(
        f"target: {settings.steps} steps of {settings.batch} x {settings.length} tokens in {seconds:.0f} s "
        f"({settings.steps * settings.batch * settings.length / seconds:,.0f} tok/s), loss {losses[0]:.2f} "
        f"-> {np.mean(last):.2f}"
    )
    return losses


@torch.no_grad()
def heldout_loss(model: Any, samples: Sequence[Sample], length: int = 256, most: int = 24) -> float:
    """Mean cross entropy of the assistant's tokens of the first `most` samples, nats."""
    total = count = 0.0
    for sample in samples[:most]:
        ids = torch.from_numpy(np.asarray(sample.input_ids, np.int64)[None, : length + 1])
        mask = torch.from_numpy(np.asarray(sample.loss_mask[: length + 1])[1:])
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0].float()
        losses = F.cross_entropy(logits, ids[0, 1:], reduction="none")[mask]
        total, count = total + float(losses.sum()), count + len(losses)
    return total / max(count, 1.0)
