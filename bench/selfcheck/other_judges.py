"""How other tools tell that head is slower, for the error rates beside ours. Pure.

pytest-benchmark's `--benchmark-compare-fail=mean:2%`; pyperf's two-sided t-test at 95%; Mann-Whitney at 5%
(asv, benchstat, google/benchmark use it at their own levels). Only "slower" counts as an alarm or a hit.

They take base first and head second. `alarms` makes that order from a gate's own segments: base's of the
first half of the session, head's of the second. So all of them judge the same machine in the same minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import mannwhitneyu, ttest_ind

from steptime.records.pairs import Layer, Pair

Floats = NDArray[np.float64]
Judge = Callable[[Floats, Floats], bool]


def pytest_benchmark_mean(base: Floats, head: Floats) -> bool:
    """`--benchmark-compare-fail=mean:2%`: a point comparison of means."""
    return bool(100.0 * head.mean() / base.mean() - 100.0 > 2.0)


def pyperf_t(base: Floats, head: Floats) -> bool:
    """pyperf's `is_significant` and a slower mean: two-sided Student t, equal variances, 95%."""
    return bool(ttest_ind(head, base).pvalue <= 0.05 and head.mean() > base.mean())


def mann_whitney(base: Floats, head: Floats) -> bool:
    """Two-sided rank test at 5% and a slower median."""
    return bool(mannwhitneyu(head, base).pvalue <= 0.05 and np.median(head) > np.median(base))


RIVALS: Final[Mapping[str, Judge]] = {
    "pytest-benchmark mean:2%": pytest_benchmark_mean,
    "pyperf t-test": pyperf_t,
    "Mann-Whitney": mann_whitney,
}


def base_then_head(pairs: Sequence[Pair], switch: str) -> tuple[Floats, Floats]:
    """Seconds per token of the segments without the switch in the first half of the session, and of those
    with it in the second."""
    taken = [half for pair in pairs if pair.layer is Layer.PATH for half in (pair.first, pair.second)]
    middle = len(taken) // 2
    first = [half.seconds / half.tokens for half in taken[:middle] if switch not in half.on]
    second = [half.seconds / half.tokens for half in taken[middle:] if switch in half.on]
    return np.array(first), np.array(second)


def alarms(pairs: Sequence[Pair], switch: str) -> dict[str, bool]:
    """What each of them says of a gate's pairs, in the order taken: slower or not. Too few: no alarm."""
    base, head = base_then_head(pairs, switch)
    return {name: len(base) > 1 and len(head) > 1 and judge(base, head) for name, judge in RIVALS.items()}
