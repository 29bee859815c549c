"""Plans pairs, hands their halves to the subject one after the other, and stops when the answer is clear or
the time is up.

The conductor thinks in a thread of its own. The subject's thread takes requests from a queue and puts
segments into another; it neither plans nor computes. Pairs come in blocks that repeat one group of batches.
All of a block's requests are in the queue before its first segment begins, so the subject never waits inside
a block. Between two blocks the subject stands still, drained, and the conductor plans, looks at the spread,
and shows progress. So nothing of that falls into a timed step."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from steptime.measure.lengths import Lengths, Pilot
from steptime.measure.settling import LengthPilot
from steptime.progress import Reporter
from steptime.records.pairs import Layer, Pair, Request, Segment
from steptime.statistics.design import Draw
from steptime.subjects.pairs import OnSegment, Stretch, Wanted, steps_to_cover

BLOCK_S = 8.0
"""A block lasts about so long: long beside the lead-in steps that a new group costs."""
PAIRS_PER_BLOCK = (4, 512)
PILOT_SEGMENTS = 6
"""Segments with everything off, whose median sizes the rest."""
PILOT_EVENTS = 2
"""Forced ticks, and forced flushes, of the pilot, with everything on."""
OVERTIME = 1.5
"""Measuring ends inside the least number of blocks when it has taken this many times what it was given."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a look at the pairs so far says.

    Attributes:
        stop: measuring may end.
        why: "clear", "time", ...
        left_s: seconds that the answer is thought to need still; None: not known.
    """

    stop: bool
    why: str = ""
    left_s: float | None = None


class Judge(Protocol):
    """Sees the pairs between two blocks."""

    def look(self, pairs: Sequence[Pair], elapsed_s: float, time_s: float) -> Look:
        """Whether this is enough. Must not depend on the sign of any difference."""


@dataclass(slots=True)
class Conductor:
    """One run on one subject. `requests` and `on_segment` belong to the subject's thread.

    Args:
        switches: all that are measured.
        events: layers with forced ticks or flushes that the subject has.
        draw: endless draws of pairs, once the lengths are known.
        judge: looks between two blocks.
        groups: groups of batches in the subject's cycle.
        time_s: for pairs.
        choose: fixes the lengths by the pilot.
        settle: finds how long a segment must be for a wait to cost what it does in training.
        opening: what the subject does before the pilots (an undisturbed stretch, recorded rounds).
        ready: called while the subject does that; returns when nothing runs beside it any more.
        between: called between two blocks, while the subject stands still.
        process: number of the launch, which the pairs get.
    """

    switches: tuple[str, ...]
    events: tuple[Layer, ...]
    draw: Callable[[Lengths], Iterator[Draw]]
    judge: Judge
    choose: Callable[[Pilot], Lengths]
    groups: int
    time_s: float
    reporter: Reporter
    seed: int = 0
    process: int = 0
    what: str = "measuring"
    settle: LengthPilot | None = None
    opening: Sequence[Wanted] = ()
    ready: Callable[[], None] = lambda: None
    between: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    pairs: list[Pair] = field(default_factory=list)
    lengths: Lengths | None = None
    stopped: str = ""
    fault: BaseException | None = None
    pairs_s: float = 0.0
    """Seconds that pairs took, the subject's standing still between blocks included."""
    running_on: frozenset[str] | None = None
    """What is on in what the subject has in hand; where it crashes, that is where."""
    _requests: queue.SimpleQueue[Wanted | None] = field(default_factory=queue.SimpleQueue)
    _segments: queue.SimpleQueue[Segment | None] = field(default_factory=queue.SimpleQueue)

    # -- the subject's thread --------------------------------------------------------------------------------

    def requests(self) -> Iterator[Wanted]:
        """One request after the other, until the conductor has enough."""
        while (wanted := self._requests.get()) is not None:
            self.running_on = frozenset(self.switches) if isinstance(wanted, Stretch) else wanted.on
            yield wanted

    def on_segment(self, segment: Segment) -> None:
        """A finished segment, in the order of the requests."""
        self._segments.put(segment)

    def run(self, subject: Callable[[Iterator[Wanted], OnSegment], object]) -> None:
        """Let `subject(requests, on_segment)` run in this thread while the conductor thinks in its own.

        Raises what the subject raised, or else what the conductor raised. Pairs taken so far are kept.
        """
        thread = threading.Thread(target=self._guarded, name="conductor", daemon=True)
        thread.start()
        try:
            subject(self.requests(), self.on_segment)
        finally:
            self._segments.put(None)
            thread.join()
            self.reporter.end()
        if self.fault is not None:
            raise self.fault

    # -- the conductor's thread ------------------------------------------------------------------------------

    def _guarded(self) -> None:
        try:
            self._conduct()
        except _SubjectEnded:
            self.stopped = self.stopped or "the subject ended"
        except BaseException as error:
            self.fault = error
        finally:
            self._requests.put(None)

    def _conduct(self) -> None:
        for wanted in self.opening:
            self._requests.put(wanted)
        self.ready()
        if self.settle is not None:
            for request in self.settle.requests():
                self.settle.on_segment(self._take([request])[0])
        lengths = self.lengths = self.choose(self._take_pilot())
        started = self.clock()
        self.reporter.begin(self.what)
        draws = self.draw(lengths)
        generator = random.Random(self.seed)
        order: list[int] = []
        while True:
            if not order:
                order = generator.sample(range(self.groups), self.groups)
            self._take_block(draws, order.pop(), lengths)
            self.between()
            elapsed_s = self.pairs_s = self.clock() - started
            look = self.judge.look(self.pairs, elapsed_s, self.time_s)
            if look.stop or elapsed_s > OVERTIME * self.time_s:
                self.stopped = look.why or "time"
                return
            left_s = max(0.0, self.time_s - elapsed_s)
            left_s = left_s if look.left_s is None else min(left_s, look.left_s)
            share = elapsed_s / max(1e-9, elapsed_s + left_s)
            self.reporter.advance(f"{self.what}: {len(self.pairs)} pairs", share, left_s)

    def _take_pilot(self) -> Pilot:
        """Everything off for the steps, everything on for ticks and flushes."""
        off = [Request(frozenset(), 1, group=0) for _ in range(PILOT_SEGMENTS)]
        everything = frozenset(self.switches)
        events = [
            Request(everything, 1, group=0, layer=layer) for layer in self.events for _ in range(PILOT_EVENTS)
        ]
        # The first one comes when whatever the subject did before is over.
        taken = self._take(off[:1])
        started = self.clock()
        taken += self._take(off[1:])
        wall_s = self.clock() - started
        seconds = [segment.seconds for segment in taken]
        forced, step_s = self._take(events), median(seconds)
        by_layer = {
            layer: forced[at * PILOT_EVENTS : (at + 1) * PILOT_EVENTS] for at, layer in enumerate(self.events)
        }
        return Pilot(
            step_s=step_s,
            event_steps={
                layer: max(steps_to_cover(segment, step_s) for segment in own)
                for layer, own in by_layer.items()
            },
            event_s={
                layer: max(max(0.0, segment.seconds - segment.steps * step_s) for segment in own)
                for layer, own in by_layer.items()
            },
            ends_s=max(0.0, (wall_s - sum(seconds[1:])) / len(seconds[1:])),
        )

    def _take_block(self, endless: Iterator[Draw], group: int, lengths: Lengths) -> None:
        least, most = PAIRS_PER_BLOCK
        number, draws, lasts_s = len(self.pairs), list[Draw](), 0.0
        while len(draws) < least or (lasts_s < BLOCK_S and len(draws) < most):
            draws.append(next(endless))
            lasts_s += lengths.pair_s(draws[-1].layer)
        # Pairs of a layer stand together: going from the path to ticks costs lead-in steps each time.
        draws.sort(key=lambda draw: [*Layer].index(draw.layer))
        requests = [
            Request(on, lengths.steps[draw.layer], group, draw.layer, number + place, half)
            for place, draw in enumerate(draws)
            for half, on in enumerate((draw.first, draw.second))
        ]
        segments = self._take(requests)
        for place, draw in enumerate(draws):
            first, second = segments[2 * place : 2 * place + 2]
            self.pairs.append(
                Pair(number + place, draw.layer, draw.question, first, second, process=self.process)
            )

    def _take(self, requests: Sequence[Request]) -> list[Segment]:
        for request in requests:
            self._requests.put(request)
        found = []
        for _ in requests:
            segment = self._segments.get()
            if segment is None:
                raise _SubjectEnded
            found.append(segment)
        return found


class _SubjectEnded(Exception):
    """The subject has come to its end before the conductor had."""
