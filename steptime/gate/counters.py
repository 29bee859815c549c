"""Exact counts of both sides of a gate, each side by the same counter.

The code that counts is part of the tree that is judged. Where it differs between the two, both sides are
counted by head's counter and by base's: a tree made of one's counter over the other's trainer. So a change to
the counter can neither blame the trainer nor hide what it does."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from steptime.counting.counting import ProcessCounter
from steptime.gate.worktrees import Tree
from steptime.progress import Reporter
from steptime.records.types import ALL, OFF, ExactCounts
from steptime.statistics.counts import difference
from steptime.statistics.intended import Rise, rises_by_place
from steptime.subjects.protocol import SubjectKind

COUNTER = ("bench", "steptime")
"""Folders that the counter is: what counts, what the counted run is made of, CUDA's rules. The trainer is the
rest of a tree."""
COUNTING = (
    "bench/counting.py",
    "bench/syncs",
    "steptime/counting",
    "steptime/syncs",
    "steptime/host_memory.py",
)
"""Where a change may change what is counted."""


@dataclass(slots=True)
class Counted:
    """What both sides count.

    Attributes:
        by_counter: owner of the counter ("base", "head") -> side -> counts. One entry where both trees count
            with the same code.
        faults: why a counter could not count one of the sides, one line each.
    """

    by_counter: dict[str, dict[str, ExactCounts]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def shown(self) -> dict[str, ExactCounts]:
        """The counts of the report: head's counter, or the one that could count."""
        return next(iter(self.by_counter.values()), {})


def count_both(
    kind: SubjectKind,
    trees: Sequence[Tree],
    orders: Mapping[str, Mapping[str, Any]],
    reporter: Reporter,
) -> Counted:
    """Count base and head (`trees`) with all of their own collectors on, by head's counter, and where the
    counters differ by base's too."""
    reporter.say("counting syncs, operations, copies and allocations of both exactly")
    base, head = trees
    owners = [head, base] if counting_code(base.root) != counting_code(head.root) else [head]
    found = Counted()
    for owner in owners:
        if len(owners) > 1:
            reporter.say(f"base and head count with other code: counting both by {owner.name}'s counter")
        counts, faults = _count_by(owner, kind, trees, orders, mixed=len(owners) > 1)
        if faults:
            found.faults += faults
        else:
            found.by_counter[owner.name] = counts
    return found


def _count_by(
    owner: Tree,
    kind: SubjectKind,
    trees: Sequence[Tree],
    orders: Mapping[str, Mapping[str, Any]],
    *,
    mixed: bool,
) -> tuple[dict[str, ExactCounts], list[str]]:
    counts: dict[str, ExactCounts] = {}
    faults: list[str] = []
    with ExitStack() as stack:
        pending = []
        for tree in trees:
            root = tree.root
            if mixed and tree is not owner:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dflash-counter-")))
                root = overlay(owner.root, tree.root, folder)
            config = kind.counted_as(kind.from_order(orders[tree.name]["config"]))
            counter = ProcessCounter(
                config,
                subject=kind.name,
                module=kind.doors.counting,
                root=root,
                python=tree.python,
                all_collectors=True,
            )
            one = counter.start({OFF: (), ALL: ()})
            stack.callback(one.close)
            pending.append(one)
        for tree, one in zip(trees, pending, strict=True):
            found, wrong = one.result()
            whose = f" by {owner.name}'s counter" if mixed else ""
            faults += [f"{tree.name}{whose}: {fault}" for fault in wrong]
            if ALL in found:
                counts[tree.name] = replace(found[ALL], arm=tree.name)
    return counts, faults


def overlay(counter: Path, trainer: Path, folder: Path) -> Path:
    """A tree whose counter is that of `counter` and whose trainer is that of `trainer`, made of links."""
    for entry in trainer.iterdir():
        if entry.name not in (*COUNTER, ".git"):
            (folder / entry.name).symlink_to(entry)
    for name in COUNTER:
        if (counter / name).exists():
            (folder / name).symlink_to(counter / name)
    return folder


def counting_code(root: Path) -> str:
    """Digest of the code that counts."""
    digest = hashlib.sha256()
    for place in COUNTING:
        path = root / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.relative_to(root).as_posix().encode())
            digest.update(file.read_bytes() if file.exists() else b"")
    return digest.hexdigest()


def added(counted: Counted, base: str, head: str) -> tuple[dict[str, int | None], list[str]]:
    """What head counts more than base by kind, and why that cannot be told.

    Of two counters the one by which a kind rose more speaks: what either of them sees has happened. A counter
    that could not count both sides is told of, and the other one speaks alone.
    """
    most: dict[str, int | None] = {}
    faults: list[str] = []
    for counts in counted.by_counter.values():
        found, fault = difference(counts.get(base), counts.get(head), base, head)
        if found is None:
            faults.append(fault)
            continue
        for kind, more in found.items():
            known = most.get(kind)
            most[kind] = more if known is None or (more is not None and more > known) else known
    if not most and not faults and counted.faults:
        faults = list(counted.faults)
    return ({}, faults) if faults else (most, [])


def rises(counted: Counted, base: str, head: str) -> tuple[Rise, ...]:
    """Where head counts more, by every counter; of two that see the same rise, the larger."""
    found: dict[tuple[str, str, str], Rise] = {}
    for counts in counted.by_counter.values():
        if base in counts and head in counts:
            for rise in rises_by_place(counts[base], counts[head]):
                key = (rise.kind, rise.role, rise.where)
                if key not in found or rise.added > found[key].added:
                    found[key] = rise
    return tuple(found.values())
