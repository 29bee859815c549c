"""Exact counts of two sides laid beside each other. Pure."""

from __future__ import annotations

from steptime.records.types import ExactCounts

KINDS = ("syncs", "operations", "copies", "allocations")


def difference(
    one: ExactCounts | None, other: ExactCounts | None, name: str, other_name: str
) -> tuple[dict[str, int | None] | None, str]:
    """What `other` counts beyond `one`, by kind; or None and why the two cannot be compared."""
    for counts, of in ((one, name), (other, other_name)):
        if counts is None:
            return None, f"exact counts of {of} are missing"
        if not counts.armed:
            why = f": {'; '.join(counts.unavailable)}" if counts.unavailable else ""
            return None, f"the counter of {of} was not armed{why}"
    assert one is not None
    assert other is not None
    if one.steps != other.steps or one.steps <= 0:
        return None, f"{other_name} was counted over {other.steps} steps, {name} over {one.steps}"
    if set(one.ways) != set(other.ways):
        return (
            None,
            f"{other_name} was counted by other ways ({', '.join(other.ways)}) than {name} "
            f"({', '.join(one.ways)})",
        )
    added: dict[str, int | None] = {}
    for kind in KINDS:
        before, after = getattr(one, kind), getattr(other, kind)
        added[kind] = None if before is None or after is None else after - before
    if added["syncs"] is None:
        return None, f"syncs of {other_name} were not counted"
    return added, ""
