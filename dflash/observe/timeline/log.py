"""What a thread writes for the timeline: spans with a begin and an end, in a ring that is there from the
start."""

from __future__ import annotations

from time import perf_counter_ns

from dflash.observe.accounting import Account, cost_ns
from steptime.timeline.picture import Span

STEP, PUT, DRAW, QUEUE, PREFETCHED = "step", "put", "draw", "batches in the queue", "batches prefetched"
"""Names with a meaning: a drafter's step, a hand-over and a draw of batch `number`, and two depths."""
PER_BATCH = 12
"""No thread writes more for a batch."""


class SpanLog:
    """The last spans of one thread or stream. One writer, no lock; read when it has stopped.

    Attributes:
        count: spans so far.
    """

    __slots__ = ("_begins", "_ends", "_mask", "_names", "_numbers", "count", "label")

    def __init__(self, label: str, room: int) -> None:
        size = 1 << (room - 1).bit_length()
        self.label, self.count, self._mask = label, 0, size - 1
        self._names = [""] * size
        self._begins, self._ends, self._numbers = [0] * size, [0] * size, [0] * size

    def add(self, name: str, begin_ns: int, end_ns: int, number: int = -1) -> None:
        """Keep a span."""
        at = self.count & self._mask
        self._names[at] = name
        self._begins[at] = begin_ns
        self._ends[at] = end_ns
        self._numbers[at] = number
        self.count += 1

    def spans(self) -> list[Span]:
        """Those that are still there, in the order of their ends."""
        count, mask = self.count, self._mask
        return [
            Span(
                self._names[at & mask],
                self._begins[at & mask],
                self._ends[at & mask],
                self._numbers[at & mask],
            )
            for at in range(max(0, count - mask - 1), count)
        ]


class Timeline:
    """The logs of one run. Made before the workers start; only a run that has one records.

    Args:
        steps: optimizer steps that the picture shows, the last ones.
        batches: of one step, all drafters together.
        ahead: batches that may wait for the drafters.
    """

    def __init__(self, steps: int, batches: int, ahead: int = 0) -> None:
        self.steps = steps
        self.logs: list[SpanLog] = []
        self._room = PER_BATCH * ((steps + 1) * batches + ahead)
        self._began_ns = perf_counter_ns()

    def log(self, label: str) -> SpanLog:
        """The log of a thread (`target/0`) or of its stream (`target/0 stream`)."""
        made = SpanLog(label, self._room)
        self.logs.append(made)
        return made

    def account(self, on_s: float) -> Account:
        """What it has cost so far: each span at the cost of one, measured now.

        Args:
            on_s: time since the start.
        """
        calls = sum(log.count for log in self.logs)
        probe = SpanLog("probe", 1024)
        return Account(
            "timeline", on_s, calls, cost_ns(lambda: probe.add("probe", 1, 2)) if calls else 0.0, 0.0
        )
