"""For how long training has stood still on purpose: looks at the held-out loss and at tau, between two steps
of drafter 0. That time is no training time: MFU and the bottleneck leave it out."""

from __future__ import annotations

from time import perf_counter_ns


class Standing:
    """`with standing:` around a look. One writer, drafter 0's thread; the monitor reads."""

    def __init__(self) -> None:
        self._total_ns = self._since_ns = 0

    def __enter__(self) -> None:
        self._since_ns = perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        began_ns, self._since_ns = self._since_ns, 0
        self._total_ns += perf_counter_ns() - began_ns

    def ns(self, now_ns: int) -> int:
        """All of it up to `now_ns`, a look under way included: it shows while it lasts."""
        total_ns, since_ns = self._total_ns, self._since_ns
        # In this order a look that ends in between is missed by one reading, and never counted twice.
        return total_ns + (max(0, now_ns - since_ns) if since_ns else 0)
