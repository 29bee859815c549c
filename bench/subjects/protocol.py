"""What is measured: a small protocol, and the clock that every subject calls at its step boundaries.

A subject builds once, warms up, and then runs without a pause: at the end of each segment it takes the next
request, throws the switches, drops the washout and times the next whole cycles of batches. The requests are a
lazy iterator, so whoever plans them may look at the segments that are already there."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bench.records.types import Arm, ExactCounts, Segment

if TYPE_CHECKING:
    from bench.subjects.injection import Injection
    from bench.subjects.pairs import PairSubject

INJECTED = "injected"
"""Name of the collector that `--inject` adds: it does nothing but lose a known share of every step."""


def injected(percent: float) -> dict[str, float]:
    """The collector of `--inject` and its share of the throughput; empty for 0."""
    return {INJECTED: percent / 100.0} if percent else {}


@dataclass(frozen=True, slots=True)
class SegmentRequest:
    """One segment to take: `washout` steps dropped after the switches are thrown, then `steps` measured."""

    arm: Arm
    round: int
    order: int
    steps: int
    washout: int


@dataclass(frozen=True, slots=True)
class Taken:
    """A segment and the number of its first step, by which losses that come late are laid beside it."""

    first_step: int
    segment: Segment


OnSegment = Callable[[Taken], None]


@dataclass(frozen=True, slots=True)
class SubjectResult:
    """What a finished run leaves besides its segments.

    Attributes:
        losses: (step, loss) in any order; steps whose loss was dropped on the way are missing.
        accounted_percent: instruments' and monitor's own cost as a share of the step, per collector and for
            "all".
        stage_tokens_per_second: throughput of the slowest stage alone, None when unknown.
        peak_memory_bytes: peak of the process (or of its GPUs, whichever the subject trains on).
        notes: things to be told in the report, one line each (dropped losses, a collector that switched
            itself off).
        faults: things that make the run invalid, one line each.
    """

    losses: Sequence[tuple[int, float]] = ()
    accounted_percent: Mapping[str, float] | None = None
    stage_tokens_per_second: float | None = None
    peak_memory_bytes: int | None = None
    notes: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


class Subject(Protocol):
    """Something that trains in steps, replays one cycle of batches, and has collectors with switches."""

    name: str
    collectors: tuple[str, ...]
    cycle: int
    """Steps after which the same batches come again."""
    washout: int
    """Steps that may still carry the former arm's work, or the cold start of a turn."""
    warmup: int
    """Steps before the first segment."""
    devices: tuple[str, ...]
    """Names of the devices that it works on."""

    def open(self) -> None:
        """Build everything that is built once. Raises UserError for bad input."""

    def run(self, requests: Iterator[SegmentRequest], on_segment: OnSegment) -> SubjectResult:
        """Run until `requests` ends, calling `on_segment` for each in turn, on whatever thread the steps
        run."""

    def close(self) -> None:
        """Release everything; may be called after a failed open."""


class Settings(Protocol):
    """The user's settings of a subject. Only the subject looks inside; the rest of the harness names and
    compares them."""

    @property
    def name(self) -> str:
        """Of the config, by which baselines are found."""

    def digest(self) -> str:
        """Equal for settings that train alike."""


class SubjectKind(Protocol):
    """What can be asked for with `--subject NAME`: makes subjects, and says what else can be asked about
    them."""

    name: str
    counted: bool
    """Its steps work on a device: a verdict needs exact counts, and a gate compares the first losses of both
    commits."""
    gate_launches: int | None
    """Launches of a gate where building costs next to nothing; None: as many as the gate itself thinks
    fit."""

    def devices(self, settings: Any) -> Sequence[str]:
        """Names of the devices that a subject of these settings works on."""

    def make(
        self, settings: Any, *, inject_percent: float = 0.0, plant: str = "", time_stages: bool = False
    ) -> Subject:
        """A subject, not built yet.

        Args:
            inject_percent: adds a collector `INJECTED` that loses this share of the throughput.
            plant: name of a bad collector to add.
            time_stages: also time each stage alone, before the run.

        Raises:
            UserError: no such plant.
        """

    def make_pairs(
        self,
        settings: Any,
        *,
        injections: Sequence[Injection] = (),
        plant: str = "",
        time_stages: bool = False,
    ) -> PairSubject:
        """A subject that is measured in pairs, not built yet.

        Args:
            injections: known costs, each a switch of its own.
            plant: name of a bad collector to add.
            time_stages: also time each stage alone, before the run.

        Raises:
            UserError: no such plant.
        """

    def counted_as(self, settings: Any) -> Mapping[str, Any]:
        """Settings for the counting process, as JSON; only called where `counted`."""

    def count(self, request: Mapping[str, Any]) -> Mapping[str, ExactCounts]:
        """Inside the counting process: exact counts by arm.

        Args:
            request: `config` (of `counted_as`), `plants`, `arms` {name: collectors that are on},
                `all_collectors` (the arm `all` means all that this tree has).
        """

    def to_order(self, settings: Any, cache: Callable[[Path, str], Path]) -> dict[str, Any]:
        """Settings for a process of a gate, as JSON. Only those that differ from the defaults: base may not
        know the newest.

        Args:
            cache: (the folder of prepared data, the folder of the code that prepares it) -> the folder for
                this process.
        """

    def from_order(self, order: Mapping[str, Any]) -> Any:
        """The settings that `to_order` wrote."""

    def trace(self, settings: Any, steps: int) -> list[tuple[int, float, float]]:
        """(step, loss, gradient norm) of the first steps of real training; only called where `counted`."""


class Marks(Protocol):
    """How step boundaries are timed."""

    def reserve(self, steps: int) -> None:
        """Make room for `steps` marks, so that none is made while a segment runs."""

    def begin(self) -> None:
        """Everything before is finished: the first mark."""

    def mark(self, index: int) -> None:
        """The end of measured step `index`."""

    def end(self, steps: int) -> tuple[float, tuple[float, ...]]:
        """Everything is finished: seconds of the whole, and of each step."""


class HostMarks:
    """Boundaries by the host's clock: right where a step's work is done when its boundary is reached."""

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock_ns = clock_ns
        self._times: list[int] = [0] * 64

    def reserve(self, steps: int) -> None:
        if len(self._times) < steps + 1:
            self._times = [0] * (steps + 1)

    def begin(self) -> None:
        self._times[0] = self._clock_ns()

    def mark(self, index: int) -> None:
        self._times[index + 1] = self._clock_ns()

    def end(self, steps: int) -> tuple[float, tuple[float, ...]]:
        times = self._times[: steps + 1]
        each = tuple((b - a) * 1e-9 for a, b in itertools.pairwise(times))
        return (times[steps] - times[0]) * 1e-9, each


def busy_wait(nanoseconds: int) -> int:
    """Keep a core busy without holding the GIL (sha256 lets it go for large input); the last stretch holds
    it.

    Returns the nanoseconds that it took.
    """
    started = time.perf_counter_ns()
    while nanoseconds - (time.perf_counter_ns() - started) > 150_000:
        hashlib.sha256(_BLOCK)
    while time.perf_counter_ns() - started < nanoseconds:
        pass
    return time.perf_counter_ns() - started


_BLOCK = bytes(65536)


class Stepper:
    """Called at each step boundary by the subject; everything between two segments happens in here.

    Args:
        cycle: steps of the cycle; the phase of a segment is the place in it of its first step.
        requests: taken one by one, only when the last segment is done.
        switch: throws the collectors' switches to those of an arm.
        injected: share of the time lost per collector name (0.02: the throughput drops by 2%), spent in the
            arms that carry it: at each step, or where there is a fence at the segment's end, when all stand
            still. Another thread's work would go on beside a wait and make up for part of it (2% lost by the
            drafter alone cost 1.2% on two shared cores).
        marks, clock_ns: how boundaries are timed; a simulated subject brings its own.
        delay: loses nanoseconds.
        waits_on_host: False where `delay` only enqueues a wait on the device, which the next step's time then
            holds.
        fence: waits until all that the steps so far left to other threads and to devices is done, at both
            ends of a segment. What it waits for at the end belongs to the segment.

    Attributes:
        pause_step: the next step at whose boundary the fence waits; known since the boundary where it waited
            last.
    """

    def __init__(
        self,
        *,
        cycle: int,
        requests: Iterator[SegmentRequest],
        on_segment: OnSegment,
        switch: Callable[[Arm], None],
        injected: Mapping[str, float] | None = None,
        marks: Marks | None = None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        delay: Callable[[int], object] = busy_wait,
        waits_on_host: bool = True,
        fence: Callable[[], None] | None = None,
    ) -> None:
        self._cycle = cycle
        self._requests = requests
        self._on_segment = on_segment
        self._switch = switch
        self._injected = dict(injected or {})
        self._clock_ns = clock_ns
        self._marks: Marks = marks or HostMarks(clock_ns)
        self._delay = delay
        self._waits_on_host = waits_on_host
        self._fence = fence
        self._request: SegmentRequest | None = None
        self._washout = 0
        self._done = 0
        self._first_step = 0
        self._tokens: list[int] = []
        self._share = 0.0
        self._owed_ns = 0.0
        self._last_ns = 0
        self.pause_step = -1
        self.finished = False
        """No request is left: the subject stops at this boundary."""

    def __call__(self, step: int, tokens: int) -> None:
        """The end of step `step` (from 0), which trained on `tokens` real tokens."""
        if self._share and self._fence is None:
            self._lose_time()
        request = self._request
        if request is None:
            self._next(step)
            return
        if self._washout:
            self._washout -= 1
            if not self._washout:
                self._begin(step, request)
            return
        last = self._done + 1 == request.steps
        if last and self._fence is not None:
            self._fence()
            if self._share:
                self._lose_time()
        self._marks.mark(self._done)
        self._tokens[self._done] = tokens
        self._done += 1
        if last:
            self._finish(request)
            self._next(step)

    def _lose_time(self) -> None:
        # The share is of the throughput: of every second, waits included, so many parts are lost. What one
        # wait overshoots, the next one owes.
        entered_ns = self._clock_ns()
        owed = self._owed_ns + (entered_ns - self._last_ns) * self._share / (
            1.0 - self._share * self._waits_on_host
        )
        if owed > 0:
            self._delay(int(owed))
        self._last_ns = self._clock_ns()
        # By the clock and not by what the wait says of itself: the calls around it are lost as well, 2 us in
        # a step of 2 ms.
        self._owed_ns = owed - (self._last_ns - entered_ns) if self._waits_on_host else 0.0

    def _next(self, step: int) -> None:
        request = next(self._requests, None)
        self._request = request
        if request is None:
            self.finished = True
            self.pause_step = -1
            self._share = 0.0
            return
        self._marks.reserve(request.steps)
        if len(self._tokens) != request.steps:
            self._tokens = [0] * request.steps
        self._switch(request.arm)
        self._share = sum(self._injected.get(name, 0.0) for name in request.arm.collectors)
        self._owed_ns = 0.0
        self._last_ns = self._clock_ns()
        self._washout = request.washout
        self.pause_step = step + self._washout
        if not self._washout:
            self._begin(step, request)

    def _begin(self, step: int, request: SegmentRequest) -> None:
        self._done = 0
        self._first_step = step + 1
        self.pause_step = step + request.steps
        if self._fence is not None:
            self._fence()
        self._marks.begin()
        self._last_ns = self._clock_ns()

    def _finish(self, request: SegmentRequest) -> None:
        seconds, each = self._marks.end(request.steps)
        self._on_segment(
            Taken(
                first_step=self._first_step,
                segment=Segment(
                    arm=request.arm.name,
                    round=request.round,
                    order=request.order,
                    steps=request.steps,
                    tokens=sum(self._tokens),
                    seconds=seconds,
                    step_seconds=each,
                    phase=self._first_step % self._cycle,
                    step_tokens=tuple(self._tokens),
                ),
            )
        )
