"""The light subject in pairs of segments: fixed CPU work in each step, a monitor that is part of the only
thread, and switches that lose a known time in the path, at a tick, at a flush, or some time after a tick.

Two clocks, as in `steptime.subjects.spin`: the machine's, or a simulated one with noise of known size, on
which minutes take no time at all."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from steptime.machine import cores
from steptime.records.pairs import CONTROL, PLACEBO, Layer, Request
from steptime.subjects.control import ControlLoss
from steptime.subjects.injection import Injection, Place
from steptime.subjects.pairs import OnSegment, PairStepper, Round, Stretch, Wanted
from steptime.subjects.protocol import SubjectResult, busy_wait
from steptime.subjects.spin import (
    BLOCK_BYTES,
    STEP_BYTES,
    Noise,
    SimulatedClock,
    batch_shares,
    hash_bytes,
    levels,
)

TICK_S, FLUSH_S, LATE_S = 1.0, 10.0, 1.0
"""Seconds between ticks, between flushes, and between a tick and the work that it starts for later."""
FREE_STEPS = 2
"""Steps of a change of group that still hold the former one: this subject builds so far ahead."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a switch loses.

    Attributes:
        path: share of each step's time, waits included.
        tick_s, flush_s: seconds at each tick, at each flush.
        late_s: seconds, `LATE_S` after each tick.
    """

    path: float = 0.0
    tick_s: float = 0.0
    flush_s: float = 0.0
    late_s: float = 0.0

    @property
    def layers(self) -> frozenset[Layer]:
        """Where it costs something."""
        parts = {Layer.PATH: self.path, Layer.TICK: self.tick_s + self.late_s, Layer.FLUSH: self.flush_s}
        return frozenset(layer for layer, cost in parts.items() if cost)


def cost_of(injection: Injection) -> Cost:
    """The cost of an injection. There is one thread, so the place of a tick's or a flush's work makes no
    difference, but for when it is done."""
    if injection.layer is Layer.PATH:
        return Cost(path=injection.percent / 100.0)
    seconds = injection.seconds(TICK_S, FLUSH_S)
    if injection.place is Place.THREAD:
        return Cost(late_s=seconds)
    return Cost(tick_s=seconds) if injection.layer is Layer.TICK else Cost(flush_s=seconds)


class SpinPairs:
    """`PairSubject` of fixed work.

    Args:
        costs: the switches.
        step_s: seconds of a step on the simulated clock.
        groups: groups of batches, of unlike size.
        noise: use the simulated clock with this noise.
        crash_with: raises while this switch is on (a planted fault).
        corrupt: a switch that changes the losses while it is on (a planted fault).
    """

    def __init__(
        self,
        costs: Mapping[str, Cost] | None = None,
        *,
        step_s: float = 0.008,
        groups: int = 8,
        noise: Noise | None = None,
        crash_with: str = "",
        corrupt: str = "",
    ) -> None:
        self.name = "spin" if noise is None else "spin-simulated"
        self.costs = dict({"idle": Cost()} if costs is None else costs)
        self.switches = (*self.costs, PLACEBO)
        self.layers: Mapping[str, frozenset[Layer]] = {
            name: self.costs[name].layers if name in self.costs else frozenset() for name in self.switches
        }
        self.periods: Mapping[Layer, float] = {Layer.TICK: TICK_S, Layer.FLUSH: FLUSH_S}
        self.groups = self.warmup = groups
        self.devices: tuple[str, ...] = ("cpu",)
        self.pilot_switch: str | None = None
        self.controlled = True
        self._crash_with, self._corrupt = crash_with, corrupt
        self._shares = batch_shares(groups)
        self._on: frozenset[str] = frozenset()
        self._group: int | None = None
        self._building: tuple[int, int | None] = (0, None)
        self._due: deque[tuple[int, str]] = deque()
        self._block = b""
        self.paid_ns = dict.fromkeys(self.costs, 0)
        self._paid_before: dict[str, int] = {}
        self._stretch_ns = self._tick_ns = self._flush_ns = 0
        self._flushes, self._until = -1, 0
        self._accounted: dict[str, float] | None = None
        self._noise = noise
        self._clock: Callable[[], int] = time.perf_counter_ns
        self._lose: Callable[[int], object] = busy_wait
        self._work: Callable[[int], object] = self._hash
        self.control = ControlLoss()
        if noise is not None:
            simulated, level = SimulatedClock(), levels(noise)
            self._clock, self._lose = simulated, simulated.advance
            self.control = ControlLoss(simulated.advance)
            self._work = lambda group: simulated.advance(1e9 * step_s * self._shares[group] * next(level))

    def open(self) -> None:
        """Make what is hashed."""
        self._block = bytes(BLOCK_BYTES)

    def close(self) -> None:
        self._block = b""

    def clock_s(self) -> float:
        """Seconds of the clock that this subject runs by."""
        return self._clock() * 1e-9

    def run_pairs(self, requests: Iterator[Wanted], on_segment: OnSegment) -> SubjectResult:
        """Run steps until the requests end; real work stays on one core."""
        real = self._noise is None
        with cores.kept_on(max(cores.usable(), default=None)) if real else contextlib.nullcontext():
            return self._run(requests, on_segment)

    def _run(self, requests: Iterator[Wanted], on_segment: OnSegment) -> SubjectResult:
        stepper = PairStepper(
            first_pause=self.warmup - 1,
            requests=requests,
            on_segment=on_segment,
            hands=self,
            clock_ns=self._clock,
            control_s=lambda: self.control.take_s(),
        )
        losses: list[tuple[int, float]] = []
        step = 0
        while not stepper.finished:
            if step >= self._building[0]:
                self._group = self._building[1]
            group = step % self.groups if self._group is None else self._group
            self._step(group)
            if self._crash_with in self._on:
                raise RuntimeError(f"planted crash with {self._crash_with} on")
            losses.append((step, 2.0 + self._shares[group] + 1e-7 * (self._corrupt in self._on)))
            stepper(step)
            step += 1
        return SubjectResult(losses=losses, accounted_percent=self._accounted)

    def _hash(self, group: int) -> None:
        hash_bytes(self._block, int(STEP_BYTES * self._shares[group]))

    def _step(self, group: int) -> None:
        began_ns = self._clock()
        self._work(group)
        worked_ns = self._clock() - began_ns
        # Several shares of the throughput lose as much as they would one after the other.
        for name in self.costs:
            if name in self._on and (share := self.costs[name].path):
                self._pay(name, worked_ns * share / (1.0 - share))
                worked_ns = self._clock() - began_ns
        if CONTROL in self._on:
            self.control.pay(worked_ns)
        self._pay_due()
        if self._flushes >= 0:
            self._tick_by_clock()

    def _pay(self, name: str, nanoseconds: float) -> None:
        if nanoseconds > 0:
            began_ns = self._clock()
            self._lose(int(nanoseconds))
            self.paid_ns[name] += self._clock() - began_ns

    def _pay_due(self) -> None:
        while self._due and self._due[0][0] <= self._clock():
            _, name = self._due.popleft()
            self._pay(name, 1e9 * self.costs[name].late_s)

    def _tick(self, names: frozenset[str], flush: bool) -> None:
        for name, cost in self.costs.items():
            if name in names:
                self._pay(name, 1e9 * (cost.tick_s + (cost.flush_s if flush else 0.0)))
                if cost.late_s:
                    self._due.append((self._clock() + int(1e9 * LATE_S), name))

    def _tick_by_clock(self) -> None:
        now_ns = self._clock()
        if now_ns - self._tick_ns >= 1e9 * TICK_S:
            self._tick_ns = now_ns
            flush = now_ns - self._flush_ns >= 1e9 * (FLUSH_S - TICK_S / 2)
            if flush:
                self._flush_ns = now_ns
                self._flushes += 1
            self._tick(self._on, flush)

    # -- the stepper's hands ---------------------------------------------------------------------------------

    def stand(self) -> None:
        """Wait for what a tick has left for later."""
        while self._due:
            self._lose(max(0, self._due[0][0] - self._clock()))
            self._pay_due()

    def turn(self, request: Request, step: int) -> int:
        if request.group == self._building[1]:
            return max(0, self._building[0] - (step + 1))
        self._building = (step + 1 + FREE_STEPS, request.group)
        return FREE_STEPS

    def ready(self, request: Request, step: int) -> None:
        # What costs in the path is on in both halves where ticks are measured.
        self._on = request.on if request.layer is Layer.PATH else frozenset(self.switches)

    def force(self, request: Request) -> None:
        self._tick(request.on, request.layer is Layer.FLUSH)

    def resting(self) -> bool:
        return not self._due

    def tokens(self, group: int) -> int:
        return max(1, round(1000 * self._shares[group]))

    def begin_stretch(self, stretch: Stretch, step: int) -> None:
        self._building = (step + 1 + FREE_STEPS, None)
        self._on = frozenset(self.switches)
        self._paid_before = dict(self.paid_ns)
        self._stretch_ns = self._tick_ns = self._flush_ns = self._clock()
        self._flushes, self._until = 0, stretch.flushes

    def stretched(self) -> bool:
        return self._flushes >= self._until

    def end_stretch(self) -> None:
        lasted_ns = self._clock() - self._stretch_ns
        self._flushes = -1
        shares = {
            name: 100.0 * (self.paid_ns[name] - self._paid_before[name]) / lasted_ns for name in self.costs
        }
        self._accounted = {**shares, "all": sum(shares.values())}

    def begin_round(self, wanted: Round, step: int) -> int:
        return 0

    def end_round(self) -> None: ...
