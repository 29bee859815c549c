"""Durations in fixed log-buckets: the layout a worker writes, and the pure functions that read it.

A histogram is one flat list of ints, so that a reader takes all of it with one slice, which the GIL makes atomic:

    cells[0], cells[1]   maximum, one of two slots in use (see `HistogramReader`)
    cells[2]             sum, nanoseconds
    cells[3 + b]         count of bucket b

Bucket b holds the value b for b < 16; above that an octave has 8 buckets of equal width, so a bucket's edge is off by
at most 12.5% and its middle by 6.25%. signed 64-bit values fit: nothing is clamped and nothing is allocated while it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SUM = 2
FIRST_BUCKET = 3
BUCKETS = 16 + 8 * 59


def new_cells() -> list[int]:
    """An empty histogram."""
    return [0] * (FIRST_BUCKET + BUCKETS)


def bucket_of(value_ns: int) -> int:
    """Bucket of a duration. The recorder has these lines inlined."""
    shift = value_ns.bit_length() - 4
    return (shift << 3) + (value_ns >> shift) if shift > 0 else value_ns


def bucket_edges_ns(bucket: int) -> tuple[int, int]:
    """Lowest duration in the bucket and lowest above it, nanoseconds."""
    if bucket < 16:
        return bucket, bucket + 1
    shift, mantissa = (bucket >> 3) - 1, 8 + (bucket & 7)
    return mantissa << shift, (mantissa + 1) << shift


@dataclass
class Window:
    """What happened between two readings: counts by bucket, sum and maximum, nanoseconds."""

    counts: dict[int, int] = field(default_factory=dict)
    sum_ns: int = 0
    max_ns: int = 0

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    def add(self, other: Window) -> None:
        """Merge another window into this one; exact, since the buckets are the same."""
        for bucket, count in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count
        self.sum_ns += other.sum_ns
        self.max_ns = max(self.max_ns, other.max_ns)

    def statistics_ms(self) -> dict[str, float]:
        """`mean`, `max`, `p50`, `p95`, `p99` in milliseconds and `count`. Empty when nothing was recorded."""
        count = self.count
        if not count:
            return {}
        p50, p95, p99 = quantiles_ns(self.counts, (0.5, 0.95, 0.99))
        # A late maximum (see HistogramReader) may come without its span; a quantile is never over the maximum.
        top = float(self.max_ns) if self.max_ns else p99
        return {
            "mean": self.sum_ns / count / 1e6,
            "max": top / 1e6,
            "p50": min(p50, top) / 1e6,
            "p95": min(p95, top) / 1e6,
            "p99": min(p99, top) / 1e6,
            "count": float(count),
        }


def quantiles_ns(counts: Mapping[int, int], shares: Sequence[float]) -> list[float]:
    """Quantiles by nearest rank, linear inside a bucket. `shares` ascending in (0, 1]; `counts` not empty."""
    total = sum(counts.values())
    found: list[float] = []
    below = 0
    wanted = iter(shares)
    share = next(wanted, None)
    for bucket in sorted(counts):
        inside = counts[bucket]
        while share is not None and below + inside >= share * total:
            low, high = bucket_edges_ns(bucket)
            found.append(low + (high - low) * max(0.0, share * total - below) / inside)
            share = next(wanted, None)
        below += inside
    return found


class HistogramReader:
    """Takes deltas from a histogram that another thread writes, without a lock.

    The maximum is kept in the slot that `owner.slot` names. A reading clears the idle slot, points the writer at it and
    reads the other. A writer that had read `slot` just before may still store into the old one: such a late store is
    found, and reported, by the next reading, so no maximum is lost.
    """

    def __init__(self, owner: HasHistogram) -> None:
        self._owner = owner
        self._before = new_cells()
        self._seen = [0, 0]

    def read(self) -> Window:
        """What was recorded since the last reading."""
        owner, seen = self._owner, self._seen
        old = owner.slot
        idle = 1 - old
        late = owner.cells[idle]
        window = Window()
        if late > seen[idle]:
            window.max_ns = late
        owner.cells[idle] = seen[idle] = 0
        owner.slot = idle
        now = owner.cells[:]
        seen[old] = now[old]
        window.max_ns = max(window.max_ns, now[old])
        before, self._before = self._before, now
        if now[SUM:] == before[SUM:]:
            return window
        window.sum_ns = now[SUM] - before[SUM]
        window.counts = {
            index - FIRST_BUCKET: now[index] - before[index]
            for index in range(FIRST_BUCKET, len(now))
            if now[index] != before[index]
        }
        return window


class HasHistogram:
    """What a reader needs of a writer: `cells` (layout above) and the slot of the maximum in use."""

    __slots__ = ("cells", "slot")

    def __init__(self) -> None:
        self.cells = new_cells()
        self.slot = 0
