"""Ticks become one row: the values of a flush window from the values of its ticks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dflash.observe.metric import Metric


@dataclass
class _Sum:
    total: float = 0.0
    weight: float = 0.0
    top: float = float("-inf")
    last: float = 0.0


@dataclass
class FlushWindow:
    """Reduces each key by its metric's rule; a key that some ticks lack is reduced over the ticks that have it."""

    _sums: dict[str, _Sum] = field(default_factory=dict)
    _metrics: dict[str, Metric | None] = field(default_factory=dict)

    def add(self, values: dict[str, float], seconds: float, find: Callable[[str], Metric | None]) -> None:
        """One tick's values, over `seconds`."""
        for key, value in values.items():
            if key not in self._metrics:
                self._metrics[key] = find(key)
            metric = self._metrics[key]
            if metric is not None and metric.reduction == "none":
                continue
            one = self._sums.setdefault(key, _Sum())
            weight = seconds if metric is None or metric.weight is None else values.get(metric.weight_of(key), 0.0)
            one.total += value if metric is not None and metric.reduction == "sum" else value * weight
            one.weight += weight
            one.top = max(one.top, value)
            one.last = value

    def take(self) -> dict[str, float]:
        """The reduced values; the window starts anew. A mean whose weights are all zero is left out."""
        values: dict[str, float] = {}
        for key, one in self._sums.items():
            metric = self._metrics[key]
            reduction = "mean" if metric is None else metric.reduction
            if reduction == "mean":
                if one.weight > 0.0:
                    values[key] = one.total / one.weight
            else:
                values[key] = {"sum": one.total, "max": one.top, "last": one.last}[reduction]
        self._sums.clear()
        return values
