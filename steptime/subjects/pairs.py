"""How a subject is measured in pairs of segments: requests in, segments out.

A subject builds once, warms up and then runs without a pause. At the end of each segment everything stands
still; it takes the next request there, which may take its time to come, throws the switches and times the
next steps. What is not part of a segment's work (switches, garbage, steps that still hold another group's
batches) falls between segments."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from steptime.records.pairs import Layer, Request, Segment
from steptime.subjects.protocol import HostMarks, Marks, SubjectResult


@dataclass(frozen=True, slots=True)
class Stretch:
    """In place of a segment: an undisturbed stretch of the whole cycle with everything on and the monitor by
    its own clock, for `flushes` of its flushes. The accounted cost comes from it."""

    flushes: int = 3


@dataclass(frozen=True, slots=True)
class Round:
    """In place of a segment: one cycle of batches with these switches on, of which the subject makes a
    picture where it can. Nothing in it is timed or judged."""

    name: str
    on: frozenset[str]


Wanted = Request | Stretch | Round
OnSegment = Callable[[Segment], None]


class PairSubject(Protocol):
    """Something that trains in steps, repeats the batches of a step when asked, and has switches.

    Attributes:
        switches: what can be on or off: collectors, injected costs, and the placebo.
        layers: where each of them may cost something, by its own word.
        periods: seconds between two ticks and between two flushes of a run.
        groups: how many groups of batches there are, a step's each.
        warmup: steps before the first request is taken.
        devices: names of the devices that it works on.
        pilot_switch: one more, which loses what a wait for the device in each step loses; None where no host
            runs ahead of its device, so that nothing hides in short segments.
        controlled: true where it obeys the switch `CONTROL` too, which is none of its `switches`, and says
            what that lost; a subject need not have it.
    """

    name: str
    switches: tuple[str, ...]
    layers: Mapping[str, frozenset[Layer]]
    periods: Mapping[Layer, float]
    groups: int
    warmup: int
    devices: tuple[str, ...]
    pilot_switch: str | None

    def open(self) -> None:
        """Build everything that is built once. Raises UserError for bad input."""

    def run_pairs(self, requests: Iterator[Wanted], on_segment: OnSegment) -> SubjectResult:
        """Run until `requests` ends, calling `on_segment` for each in turn.

        Both are called in the thread of the steps while everything stands still: `next(requests)` may wait
        for as long as planning takes."""

    def close(self) -> None:
        """Release everything; may be called after a failed open."""


class Hands(Protocol):
    """What a subject does for the stepper at a boundary at which everything stands still, but for `resting`
    and `stretched`, which only look."""

    def stand(self) -> None:
        """Wait until all that the steps so far left to other threads and to devices is done, ticks
        included."""

    def turn(self, request: Request, step: int) -> int:
        """Set what the lead-in steps of a request need; how many of them there are. `step` is the last one
        done."""

    def ready(self, request: Request, step: int) -> None:
        """The last thing before the first timed step."""

    def force(self, request: Request) -> None:
        """Start the tick or flush of the request's layer; does not wait for it."""

    def resting(self) -> bool:
        """Whether all that the tick or flush started is done."""

    def tokens(self, group: int) -> int:
        """Real context tokens of a step of the group."""

    def begin_stretch(self, stretch: Stretch, step: int) -> None:
        """Everything on, the monitor by its own clock."""

    def stretched(self) -> bool:
        """Whether the stretch is long enough."""

    def end_stretch(self) -> None:
        """The monitor stands still again."""

    def begin_round(self, wanted: Round, step: int) -> int:
        """Begin to record; how many steps are needed. 0: this subject records nothing."""

    def end_round(self) -> None:
        """Nothing is recorded any more, and the picture is made."""


class PathHands:
    """Hands of a subject that works in one thread and has no monitor: no tick, no flush, nothing to wait for.

    Attributes:
        on: the switches that are on.
        group: of the next step; None: the cycle takes its turns.
    """

    def __init__(self) -> None:
        self.on: frozenset[str] = frozenset()
        self.group: int | None = None

    def stand(self) -> None:
        """All is done when a step returns."""

    def turn(self, request: Request, step: int) -> int:
        """The next step is of the group already."""
        self.group = request.group
        return 0

    def ready(self, request: Request, step: int) -> None:
        """Throw the switches."""
        self.on = request.on

    def force(self, request: Request) -> None:
        """Never asked for: the subject has no periods."""
        raise NotImplementedError(f"no {request.layer} here")

    def resting(self) -> bool:
        """Nothing is ever left to do."""
        return True

    def begin_stretch(self, stretch: Stretch, step: int) -> None:
        """Never asked for either."""
        raise NotImplementedError("no account here")

    def stretched(self) -> bool:
        """See `begin_stretch`."""
        return True

    def end_stretch(self) -> None:
        """See `begin_stretch`."""

    def begin_round(self, wanted: Round, step: int) -> int:
        """A loop of the user's has no recorders."""
        return 0

    def end_round(self) -> None:
        """See `begin_round`."""


FAR = 1 << 60


class PairStepper:
    """Called at each step boundary of the subject; everything between two segments happens in here.

    Args:
        first_pause: number of the warm-up's last step.
        requests: taken one by one, only when the last segment is done.
        hands: the subject's.
        marks, clock_ns: how boundaries are timed; a simulated subject brings its own.
        control_s: seconds that the control has lost since it was last asked.

    Attributes:
        pause_step: the next step at whose boundary everything stands still.
        finished: no request is left: the subject stops at this boundary.
    """

    def __init__(
        self,
        *,
        first_pause: int,
        requests: Iterator[Wanted],
        on_segment: OnSegment,
        hands: Hands,
        marks: Marks | None = None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        control_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._control_s = control_s
        self._requests, self._on_segment, self._hands = requests, on_segment, hands
        self._clock_ns = clock_ns
        self._marks: Marks = marks or HostMarks(clock_ns)
        self._pending: Request | None = None
        self._timed: Request | None = None
        self._stretching = self._recording = False
        self._first_step = self._began_ns = self._rested_ns = 0
        self.pause_step = first_pause
        self.finished = False

    def __call__(self, step: int) -> None:
        """The end of step `step`, from 0."""
        if self.finished:
            return  # a trainer makes one step more
        timed = self._timed
        if step < self.pause_step:
            if timed is not None:
                self._inside(step, timed)
            elif self._stretching and self.pause_step == FAR and self._hands.stretched():
                # Others may have begun the next step already, and stand at the end of the one after.
                self.pause_step = step + 2
            return
        if timed is not None:
            self._look(timed)
        self._hands.stand()
        if timed is not None:
            self._finish(step, timed)
        elif self._stretching:
            self._stretching = False
            self._hands.end_stretch()
        elif self._recording:
            self._recording = False
            self._hands.end_round()
        if self._pending is not None:
            self._begin(step, self._pending)
        else:
            self._next(step)

    def _inside(self, step: int, timed: Request) -> None:
        self._marks.mark(step - self._first_step)
        self._look(timed)

    def _look(self, timed: Request) -> None:
        if timed.layer is not Layer.PATH and not self._rested_ns and self._hands.resting():
            self._rested_ns = self._clock_ns()

    def _next(self, step: int) -> None:
        wanted = next(self._requests, None)
        if wanted is None:
            self.finished, self.pause_step = True, -1
        elif isinstance(wanted, Stretch):
            self._hands.begin_stretch(wanted, step)
            self._stretching, self.pause_step = True, FAR
        elif isinstance(wanted, Round):
            steps = self._hands.begin_round(wanted, step)
            if steps:
                self._recording, self.pause_step = True, step + steps
            else:
                self._next(step)
        else:
            self._marks.reserve(wanted.steps)
            lead = self._hands.turn(wanted, step)
            if lead:
                self._pending, self.pause_step = wanted, step + lead
            else:
                self._begin(step, wanted)

    def _begin(self, step: int, request: Request) -> None:
        self._pending, self._timed = None, request
        self._first_step, self._rested_ns = step + 1, 0
        self.pause_step = step + request.steps
        self._hands.ready(request, step)
        self._control_s()  # what lead-in steps lost belongs to no segment
        self._marks.begin()
        if request.layer is not Layer.PATH:
            self._began_ns = self._clock_ns()
            self._hands.force(request)

    def _finish(self, step: int, request: Request) -> None:
        self._marks.mark(step - self._first_step)
        now_ns = self._clock_ns()
        seconds, each = self._marks.end(request.steps)
        tick_s = 0.0
        if request.layer is not Layer.PATH:
            tick_s = ((self._rested_ns or now_ns) - self._began_ns) * 1e-9
            if not self._rested_ns:
                tick_s = max(tick_s, seconds)  # by another clock on a GPU
        self._timed = None
        self._on_segment(
            Segment(
                on=tuple(sorted(request.on)),
                steps=request.steps,
                tokens=request.steps * self._hands.tokens(request.group),
                seconds=seconds,
                group=request.group,
                first_step=self._first_step,
                step_seconds=each,
                tick_s=tick_s,
                control_s=self._control_s(),
            )
        )


def covers(segment: Segment) -> bool:
    """Whether the forced tick or flush, and all that it started, was over when the last step was: only then
    is its cost the time that it took from the steps, and not the time for which the end waited for it."""
    return segment.tick_s < segment.seconds


def steps_to_cover(segment: Segment, step_s: float) -> int:
    """Steps of a segment that is longer than its tick or flush: those of `segment` if it is, else such that
    it is longer by half and by a step.

    Args:
        segment: of a tick or a flush that asks everything.
        step_s: seconds of a step without one.
    """
    return segment.steps if covers(segment) else 2 + int(1.5 * segment.tick_s / step_s)
