"""Vector clocks of streams and host threads, and the virtual time that travels with them."""

from __future__ import annotations


class Clock:
    """What a stream or a host thread knows to be done.

    Attributes:
        ticks: for each stream or thread, by number: everything up to this tick of it comes before.
        time_ms: virtual time, milliseconds.
    """

    __slots__ = ("ticks", "time_ms")

    def __init__(self, ticks: dict[int, int] | None = None, time_ms: float = 0.0) -> None:
        self.ticks = {} if ticks is None else ticks
        self.time_ms = time_ms

    def copy(self) -> Clock:
        return Clock(self.ticks.copy(), self.time_ms)

    def join(self, other: Clock) -> None:
        """Know also what `other` knows."""
        own = self.ticks
        for number, tick in tuple(other.ticks.items()):
            if own.get(number, 0) < tick:
                own[number] = tick
        self.time_ms = max(self.time_ms, other.time_ms)

    def tick(self, number: int) -> int:
        """One more action of `number`, whose clock this is."""
        now = self.ticks.get(number, 0) + 1
        self.ticks[number] = now
        return now

    def covers(self, number: int, tick: int) -> bool:
        """Whether that action comes before what is done next under this clock."""
        return self.ticks.get(number, 0) >= tick
