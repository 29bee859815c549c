"""What other tools would have said about the same segments, taken base first and head second, as they take
them. Pure.

For the table of error rates beside ours: pytest-benchmark's `--benchmark-compare-fail=mean:2%`, pyperf's
t-test, and a Mann-Whitney test. The base-then-head order is made from a gate's own segments: base's of the
first half of the session, head's of the second, so that all of them judge the same machine in the same
minutes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
from scipy import stats

from bench.records.types import Segment

ALPHA: Final = 0.05


def mean_over_2_percent(base: Sequence[float], head: Sequence[float]) -> bool:
    """pytest-benchmark with `mean:2%`: a point comparison of means."""
    return float(np.mean(head)) > 1.02 * float(np.mean(base))


def pyperf_t_test(base: Sequence[float], head: Sequence[float]) -> bool:
    """pyperf: two-sample t with pooled variance, two-sided 95%, and head is the slower one."""
    found = stats.ttest_ind(head, base)
    return bool(found.pvalue < ALPHA and found.statistic > 0)


def mann_whitney(base: Sequence[float], head: Sequence[float]) -> bool:
    """Mann-Whitney, one-sided at 5%: head's times are larger."""
    return bool(stats.mannwhitneyu(head, base, alternative="greater").pvalue < ALPHA)


RIVALS: Final[Mapping[str, Callable[[Sequence[float], Sequence[float]], bool]]] = {
    "pytest-benchmark mean:2%": mean_over_2_percent,
    "pyperf t-test": pyperf_t_test,
    "Mann-Whitney": mann_whitney,
}


def base_then_head(
    segments: Sequence[Segment], base: str = "base", head: str = "head"
) -> tuple[list[float], list[float]]:
    """Seconds per token of base's segments in the first half of the session, and of head's in the second."""
    ordered = sorted(segments, key=lambda s: (s.process, s.round, s.order))
    middle = len(ordered) // 2
    first = [s.seconds / s.tokens for s in ordered[:middle] if s.arm == base]
    second = [s.seconds / s.tokens for s in ordered[middle:] if s.arm == head]
    return first, second


def alarms(segments: Sequence[Segment]) -> dict[str, bool]:
    """What each of them says of a gate's segments: slower or not. Too few segments: no alarm."""
    base, head = base_then_head(segments)
    return {name: len(base) > 1 and len(head) > 1 and judge(base, head) for name, judge in RIVALS.items()}
