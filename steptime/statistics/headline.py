"""The first line of a report: the strongest true statement. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from steptime.records.costs import Estimate, SwitchCost
from steptime.records.types import Verdict


def headline(
    verdict: Verdict,
    reasons: Sequence[str],
    cost: SwitchCost | None,
    minutes: float,
    subject: str,
    settled: Sequence[str],
) -> str:
    """The answer where there is one; else what the clock excludes, what is settled without it, and what it
    would take to answer.

    Args:
        cost: of all together, or of a gate's head.
        minutes: that pairs took.
        subject: "all together", "head".
        settled: what holds without a clock: "no count rose", "losses are equal".
    """
    if verdict is Verdict.INVALID or cost is None or cost.estimate is None:
        return f"No answer: {reasons[0]}."
    if verdict is Verdict.OVER:
        return f"Over: {reasons[0]}."
    also = "".join(f"; {text}" for text in settled)
    bound = _rounded_up(max(cost.estimate.high, 0.0))
    if verdict is Verdict.WITHIN:
        return f"{subject.capitalize()}: a cost of less than {bound}%{also}."
    lines = [f"{subject.capitalize()}: a cost of more than {bound}% is excluded{also}."]
    if verdict is Verdict.SLOWER:
        lines.append(f"Slower: {reasons[0]}.")
    if cost.minutes_to_settle is not None:
        more = max(1, round(cost.minutes_to_settle - minutes))
        lines.append(
            f"{more} more minute{'s' if more > 1 else ''} of this machine would settle the budget of "
            f"{cost.budget_percent:g}%."
        )
    return " ".join(lines)


def cost_range(found: Estimate) -> str:
    """`1.20% (0.41 to 2.00)`."""
    return f"{found.percent:.2f}% ({found.low:.2f} to {found.high:.2f})"


def _rounded_up(percent: float) -> str:
    """To a tenth, upwards, so that the sentence stays true."""
    return f"{-(-percent * 10 // 1) / 10:.1f}"
