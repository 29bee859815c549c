"""Durations on their way from a worker to the monitor: a ring that one writes, log-buckets in which the other
counts.

The worker's part is one store and one count; everything else is the monitor's. A bucket b holds the value b
for b < 16; above that an octave has 8 buckets of equal width, so an edge is off by at most 12.5% and a middle
by 6.25%. The buckets of windows add up exactly, over workers and over ticks, which quantiles themselves do
not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

RING = 512
"""Spans of a stage that may wait for the monitor. A power of two. When more come within a tick, the
statistics are of the last 512 of them and the count is of all."""
MASK = RING - 1


def bucket_of(value_ns: int) -> int:
    """Bucket of a duration of at least 0."""
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
    """Spans of a stage between two readings.

    Attributes:
        counts: by bucket.
        sum_ns, max_ns: of the spans counted.
        missed: spans that were overwritten in the ring before they were read.
    """

    counts: dict[int, int] = field(default_factory=dict)
    sum_ns: int = 0
    max_ns: int = 0
    missed: int = 0

    def take(self, values_ns: Sequence[int]) -> None:
        """Count durations."""
        counts = self.counts
        for value in values_ns:
            bucket = bucket_of(value)
            counts[bucket] = counts.get(bucket, 0) + 1
        self.sum_ns += sum(values_ns)
        self.max_ns = max(self.max_ns, *values_ns)

    def add(self, other: Window) -> None:
        """Merge another window into this one; exact, since the buckets are the same."""
        for bucket, count in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count
        self.sum_ns += other.sum_ns
        self.max_ns = max(self.max_ns, other.max_ns)
        self.missed += other.missed

    def statistics_ms(self) -> dict[str, float]:
        """`mean`, `max`, `p50`, `p95`, `p99` in milliseconds and `count`. Empty when nothing was recorded."""
        counted = sum(self.counts.values())
        if not counted:
            return {}
        p50, p95, p99 = quantiles_ns(self.counts, (0.5, 0.95, 0.99))
        top = self.max_ns
        return {
            "mean": self.sum_ns / counted / 1e6,
            "max": top / 1e6,
            "p50": min(p50, top) / 1e6,
            "p95": min(p95, top) / 1e6,
            "p99": min(p99, top) / 1e6,
            "count": float(counted + self.missed),
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


class SpanRing:
    """The last `RING` durations of a stage and how many there have been. One writer; any number of readers,
    without a lock.

    The writer stores the value first and counts it after, so a reader that takes `count` first sees only
    values that are there.

    Attributes:
        ring: durations, nanoseconds; number n is at `n & MASK`.
        count: durations so far.
    """

    __slots__ = ("count", "ring")

    def __init__(self) -> None:
        self.ring = [0] * RING
        self.count = 0


class SpanReader:
    """Takes from a ring what is new since the last reading."""

    def __init__(self, source: SpanRing) -> None:
        self._source = source
        self._seen = 0

    def stretch(self, share: float) -> None:
        """Let `share` times as many spans be new as are: the last of them, or those before them once more, as
        far as they are still in the ring."""
        count = self._source.count
        new = count - self._seen
        wanted = round(share * new)
        self._seen = max(0, count - (wanted if wanted <= new else max(new, min(RING, wanted))))

    def read(self) -> Window | None:
        """The new spans; None when there are none."""
        count, seen = self._source.count, self._seen
        new = count - seen
        if not new:
            return None
        self._seen = count
        ring = self._source.ring
        window = Window()
        first, end = seen & MASK, count & MASK
        if new >= RING:
            window.missed = new - RING
            window.take(ring[:])
        elif first < end:
            window.take(ring[first:end])
        else:
            window.take(ring[first:] + ring[:end])
        return window
