"""Ticks become one row: the values of a flush window from the values of its ticks."""

from __future__ import annotations

from collections.abc import Callable

from dflash.observe.metric import Metric, Reduce


class FlushWindow:
    """Reduces each key by its metric's rule; a key that some ticks lack is reduced over the ticks that have
    it.

    Args:
        find: the metric of a key; asked once for each key. A key without one is averaged over time.
    """

    def __init__(self, find: Callable[[str], Metric | None]) -> None:
        self._find = find
        self._rules: dict[str, tuple[Reduce, str | None]] = {}
        self._totals: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def add(self, values: dict[str, float], seconds: float) -> None:
        """One tick's values, over `seconds`."""
        rules, totals, weights = self._rules, self._totals, self._weights
        for key, value in values.items():
            rule = rules.get(key) or self._learn(key)
            match rule[0]:
                case "mean":
                    weight = seconds if rule[1] is None else values.get(rule[1], 0.0)
                    totals[key] = totals.get(key, 0.0) + value * weight
                    weights[key] = weights.get(key, 0.0) + weight
                case "sum":
                    totals[key] = totals.get(key, 0.0) + value
                case "max":
                    totals[key] = max(totals.get(key, value), value)
                case "last":
                    totals[key] = value

    def take(self) -> dict[str, float]:
        """The reduced values; the window starts anew. A mean whose weights are all zero is left out."""
        totals, weights = self._totals, self._weights
        self._totals, self._weights = {}, {}
        reduced: dict[str, float] = {}
        for key, total in totals.items():
            weight = weights.get(key, 1.0)
            if weight > 0.0:
                reduced[key] = total / weight
        return reduced

    def _learn(self, key: str) -> tuple[Reduce, str | None]:
        metric = self._find(key)
        rule: tuple[Reduce, str | None] = ("mean", None)
        if metric is not None:
            rule = (metric.reduction, metric.weight_of(key))
        self._rules[key] = rule
        return rule
