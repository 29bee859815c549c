"""Choosing the target's token: the likeliest, or one drawn at a temperature from the likeliest p."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from steptime.errors import UserError


@dataclass(frozen=True)
class Sampler:
    """How the target's tokens are chosen.

    Attributes:
        temperature: 0 chooses the likeliest token.
        top_p: only the fewest likeliest tokens whose probabilities reach it; 1 leaves all.
        seed: of the draws.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    _generators: dict[torch.device, torch.Generator] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.temperature >= 0.0:
            raise UserError(f"temperature = {self.temperature}: must be 0 (greedy) or positive")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top_p = {self.top_p}: must be over 0 and at most 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """int64 `[...]` from logits `[..., V]`."""
        if self.greedy:
            return logits.argmax(dim=-1)
        generator = self._generators.get(logits.device)
        if generator is None:
            generator = self._generators[logits.device] = torch.Generator(logits.device).manual_seed(
                self.seed
            )
        flat = self.probabilities(logits).flatten(0, -2)
        return torch.multinomial(flat, 1, generator=generator).view(logits.shape[:-1])

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """float32 of the logits' shape, sums of 1: what `choose` draws from at a temperature over 0."""
        p = torch.softmax(logits.float() / self.temperature, dim=-1)
        if self.top_p < 1.0:
            ordered, order = p.sort(dim=-1, descending=True)
            before = ordered.cumsum(dim=-1) - ordered
            ordered = ordered.masked_fill(before >= self.top_p, 0.0)
            p = torch.zeros_like(p).scatter_(-1, order, ordered)
            p /= p.sum(dim=-1, keepdim=True)
        return p
