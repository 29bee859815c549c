"""A light subject of known speed: fixed CPU work in each step, and collectors that lose a known share of it.

Two clocks. `SpinSubject()` works for real, so the noise is that of the machine.
`SpinSubject(noise=Noise(...))` lets a simulated clock run instead: the same code path in no time at all, with
noise of known size, correlation and drift."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import cores
from bench.records.types import Arm, ExactCounts
from bench.subjects.injection import Injection
from bench.subjects.pairs import PairSubject
from bench.subjects.protocol import OnSegment, SegmentRequest, Stepper, SubjectResult, busy_wait, injected
from steptime.errors import UserError

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


class SpinSubject:
    """Steps of fixed work in a cycle of `cycle` batches of unlike size.

    Args:
        costs: collectors and the share of the throughput each loses (0: none).
        step_s: seconds of a step on the simulated clock.
        noise: use the simulated clock with this noise.
        crash_in: name of an arm whose segments raise (a planted fault).
        corrupt: name of a collector that changes the losses while it is on (a planted fault).
    """

    def __init__(
        self,
        costs: Mapping[str, float] | None = None,
        *,
        step_s: float = 0.008,
        cycle: int = 8,
        noise: Noise | None = None,
        crash_in: str = "",
        corrupt: str = "",
    ) -> None:
        self.name = "spin" if noise is None else "spin-simulated"
        self.costs = dict(costs if costs is not None else {"idle": 0.0})
        self.collectors = tuple(self.costs)
        self.cycle = cycle
        self.washout = 2
        self.warmup = cycle
        self.devices: tuple[str, ...] = ("cpu",)
        self._step_s = step_s
        self._noise = noise
        self._simulated = SimulatedClock()
        self._crash_in = crash_in
        self._corrupt = corrupt
        self._arm = Arm("off")
        self._shares: Sequence[float] = batch_shares(cycle)
        self._tokens = [max(1, round(1000 * share)) for share in self._shares]
        self._work: Callable[[int], None] = self._hash
        self._block = b""

    def open(self) -> None:
        """Make what is hashed."""
        self._block = bytes(BLOCK_BYTES)

    def close(self) -> None:
        self._block = b""

    def clock_s(self) -> float:
        """Seconds of the clock that this subject runs by."""
        return time.monotonic() if self._noise is None else self._simulated.now_ns * 1e-9

    def run(self, requests: Iterator[SegmentRequest], on_segment: OnSegment) -> SubjectResult:
        """Run steps until the requests end; real work stays on one core."""
        with (
            contextlib.nullcontext()
            if self._noise is not None
            else cores.kept_on(max(cores.usable(), default=None))
        ):
            return self._run(requests, on_segment)

    def _run(self, requests: Iterator[SegmentRequest], on_segment: OnSegment) -> SubjectResult:
        clock: Callable[[], int] = time.perf_counter_ns
        delay: Callable[[int], object] = busy_wait
        if self._noise is not None:
            simulated = self._simulated
            clock, delay, self._work = simulated, simulated.advance, self._simulate(simulated, self._noise)
        stepper = Stepper(
            cycle=self.cycle,
            requests=requests,
            on_segment=on_segment,
            switch=self._throw,
            injected=self.costs,
            clock_ns=clock,
            delay=delay,
        )
        losses: list[tuple[int, float]] = []
        step = 0
        while not stepper.finished:
            place = step % self.cycle
            self._work(place)
            if self._arm.name == self._crash_in:
                raise RuntimeError(f"planted crash in arm {self._arm.name}")
            losses.append((step, self._loss(place)))
            if step >= self.warmup - 1:
                stepper(step, self._tokens[place])
            step += 1
        return SubjectResult(losses=losses)

    def _throw(self, arm: Arm) -> None:
        self._arm = arm

    def _loss(self, place: int) -> float:
        changed = self._corrupt in self._arm.collectors
        return 2.0 + self._shares[place] + (1e-7 if changed else 0.0)

    def _hash(self, place: int) -> None:
        hash_bytes(self._block, int(STEP_BYTES * self._shares[place]))

    def _simulate(self, clock: SimulatedClock, noise: Noise) -> Callable[[int], None]:
        level = levels(noise)

        def work(place: int) -> None:
            clock.advance(1e9 * self._step_s * self._shares[place] * next(level))

        return work


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
    counted = False
    gate_launches: int | None = 8

    def devices(self, settings: Any) -> tuple[str, ...]:
        return ("cpu",)

    def make(
        self, settings: Any, *, inject_percent: float = 0.0, plant: str = "", time_stages: bool = False
    ) -> SpinSubject:
        if plant:
            raise UserError("--plant needs the trainer: the spin subject has no device work to spoil")
        return SpinSubject({"idle": 0.0, "idler": 0.0} | injected(inject_percent))

    def make_pairs(
        self,
        settings: Any,
        *,
        injections: Sequence[Injection] = (),
        plant: str = "",
        time_stages: bool = False,
    ) -> PairSubject:
        from bench.subjects.spin_pairs import Cost, SpinPairs, cost_of

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
