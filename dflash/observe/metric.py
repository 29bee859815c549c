"""What a key means: the vocabulary of the registry."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Kind = Literal["instant", "delta", "ratio", "rate"]
Reduce = Literal["mean", "sum", "max", "last", "none"]


@dataclass(frozen=True)
class Metric:
    """One key, or a family of keys that differ in a name or number written `{...}`.

    Attributes:
        key: e.g. `gpu/{i}/util_pct`; a placeholder stands for any text without a slash.
        unit: of the number; `1` for a share or a plain ratio, `batches`, `ms`, ...
        kind: instant (a state at the sample), delta (since the last sample), rate (delta per second), ratio
            (of two).
        reduce: how the ticks of a flush window become one number; by default delta adds up, others average.
            `none`: they cannot (a quantile); the collector gives the window's own number, and there is none
            for a whole run.
        weight: key of the delta that weighs the mean, so that a ratio over the window is exact; default the
            tick's length.
    """

    key: str
    unit: str
    kind: Kind
    meaning: str
    source: str
    reduce: Reduce | None = None
    weight: str | None = None

    @property
    def reduction(self) -> Reduce:
        return self.reduce or ("sum" if self.kind == "delta" else "mean")

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the keys of this family; a placeholder is a named group."""
        parts = re.split(r"\{(\w+)\}", self.key)
        return re.compile(
            "".join(f"(?P<{part}>[^/]+)" if odd % 2 else re.escape(part) for odd, part in enumerate(parts))
        )

    def weight_of(self, key: str) -> str | None:
        """The weight's key that goes with `key`, its placeholders filled in from there; None without a
        weight."""
        match = self.pattern.fullmatch(key)
        return None if match is None or self.weight is None else self.weight.format_map(match.groupdict())


class MetricIndex:
    """Finds metrics by key, quickly: patterns are compiled here, and only a family's own are tried."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._families: dict[str, list[tuple[re.Pattern[str], Metric]]] = {}
        for metric in metrics:
            self._families.setdefault(metric.key.partition("/")[0], []).append((metric.pattern, metric))

    def find(self, key: str) -> Metric | None:
        """What a key means, or None when nobody has said."""
        family = self._families.get(key.partition("/")[0], ())
        return next((metric for pattern, metric in family if pattern.fullmatch(key)), None)


def drafters_rate(values: Mapping[str, float]) -> float | None:
    """Tokens that drafters trained on, per second, summed over drafters; None where nobody measured it."""
    rates = [
        value
        for key, value in values.items()
        if key.startswith("drafter/") and key.endswith("/tokens_per_second")
    ]
    return sum(rates) if rates else None
