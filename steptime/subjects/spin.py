"""The light subject's parts: fixed CPU work in each step, and a simulated clock with noise of known size,
correlation and drift. `spin_pairs` is the subject."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from steptime.errors import UserError
from steptime.machine.commit import ROOT
from steptime.records.types import ExactCounts
from steptime.subjects.injection import Injection
from steptime.subjects.pairs import PairSubject
from steptime.subjects.protocol import Doors, Named, Settings, refuse_settings

BLOCK_BYTES = 1 << 20
"""Work is hashing: single-threaded C code of a speed that hangs on the core alone, which lets the GIL go."""
STEP_BYTES = 2 << 20
"""Hashed in a step, on average; 1 to 5 ms. Fixed and not fitted to the core's speed: two processes of a gate
must do the same work to the last byte, or they differ by what the fit erred."""


@dataclass(frozen=True, slots=True)
class Noise:
    """A machine's noise for the simulated clock, as shares of a step's time.

    Attributes:
        step: SD of independent noise of each step.
        slow: SD of the slow part, an AR(1) over steps.
        correlation: of that slow part, lag one step.
        drift: speed lost linearly over 1000 steps.
        spikes: chance that a step takes three times as long.
    """

    step: float = 0.01
    slow: float = 0.01
    correlation: float = 0.98
    drift: float = 0.0
    spikes: float = 0.0
    seed: int = 0


class SimulatedClock:
    """Nanoseconds that pass only when told to."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, nanoseconds: float) -> int:
        self.now_ns += int(nanoseconds)
        return int(nanoseconds)


def hash_bytes(block: bytes, count: int) -> None:
    """The work of a step: `count` bytes, a block at a time."""
    while count > 0:
        hashlib.sha256(memoryview(block)[: min(count, len(block))])
        count -= len(block)


def batch_shares(cycle: int) -> list[float]:
    """Batches differ in length, as real ones do: +-30% around the mean, the same in every cycle."""
    shares = 1.0 + 0.3 * np.linspace(-1.0, 1.0, cycle)[np.random.default_rng(5).permutation(cycle)]
    return [float(share) for share in shares / shares.mean()]


def levels(noise: Noise) -> Iterator[float]:
    """How long each step takes, as a multiple of what it should."""
    generator = np.random.default_rng(noise.seed)
    slow = noise.slow * generator.standard_normal()
    kick = noise.slow * float(np.sqrt(1.0 - noise.correlation**2))
    for step in itertools.count():
        slow = noise.correlation * slow + kick * generator.standard_normal()
        level = slow + noise.step * generator.standard_normal() + noise.drift * step / 1000.0
        if noise.spikes and generator.random() < noise.spikes:
            level += 2.0
        yield max(0.1, 1.0 + level)


class SpinKind:
    """`--subject spin`."""

    name = "spin"
    doors = Doors()
    root = ROOT
    counted = False
    gate_launches: int | None = 8

    def settings(self, config: str | None, changes: Sequence[str]) -> Settings:
        refuse_settings(self.name, config, changes)
        return Named("spin", "0" * 8)

    def devices(self, settings: Any) -> tuple[str, ...]:
        return ("cpu",)

    def make_pairs(
        self,
        settings: Any,
        *,
        injections: Sequence[Injection] = (),
        plant: str = "",
        time_stages: bool = False,
    ) -> PairSubject:
        from steptime.subjects.spin_pairs import Cost, SpinPairs, cost_of

        if plant:
            raise UserError("--plant needs the trainer: the spin subject has no device work to spoil")
        return SpinPairs({"idle": Cost(), "idler": Cost()} | {one.name: cost_of(one) for one in injections})

    def counted_as(self, settings: Any) -> Mapping[str, Any]:
        raise NotImplementedError("spin does no device work")

    def count(self, request: Mapping[str, Any]) -> Mapping[str, ExactCounts]:
        raise NotImplementedError("spin does no device work")

    def to_order(self, settings: Any, cache: Callable[[Path, str], Path]) -> dict[str, Any]:
        return {}

    def from_order(self, order: Mapping[str, Any]) -> Any:
        return None

    def trace(self, settings: Any, steps: int) -> list[tuple[int, float, float]]:
        raise NotImplementedError("spin does not train")
