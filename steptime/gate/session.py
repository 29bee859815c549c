"""Both commits are measured: a pair of processes for each launch, until the answer is clear or the time is
up.

Two persistent worker processes, one of each commit, take turns segment by segment, so both see the same
minutes of the machine. They are launched anew a few times, since what a process got for its life (addresses,
pages, threads on cores) differs between launches and not within one: the launch is the unit of the
interval."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steptime.gate.counters import count_both
from steptime.gate.launch import BASE, HEAD, launch
from steptime.gate.verdict import GateEvidence, Options
from steptime.gate.worker_process import WorkerLost, WorkerProcess
from steptime.gate.worktrees import Tree
from steptime.machine import state
from steptime.machine.commit import ROOT, git
from steptime.measure.run import INTERRUPTED
from steptime.progress import Reporter, human_time
from steptime.statistics.effects import MIN_LAUNCHES, launches_clear
from steptime.statistics.intended import compare_losses

LAUNCHES = (MIN_LAUNCHES, 12)
"""Fewest and most launches: the more there are, the surer the interval is of what differs between them."""
LAUNCH_MINUTES = 0.8
"""A launch for each, within LAUNCHES."""
LEAST_PAIRS = 12
"""Pairs of a launch, at least."""


def gather(
    options: Options, base: Tree, head: Tree, reporter: Reporter, *, compare: bool = True
) -> GateEvidence:
    """Trace, count, and launch pairs until it is enough. What goes wrong is evidence too, not an exception;
    so is Ctrl-C.

    `compare=False` leaves traces and counts out, where both trees are known to be the same.
    """
    evidence = GateEvidence()
    try:
        _gather(evidence, options, base, head, reporter, compare)
    except KeyboardInterrupt:
        evidence.incomplete.append(f"interrupted after {len(evidence.pairs)} pairs")
        evidence.stopped = INTERRUPTED
    return evidence


def _gather(
    evidence: GateEvidence, options: Options, base: Tree, head: Tree, reporter: Reporter, compare: bool
) -> None:
    trees = (base, head)
    devices = options.kind.devices(options.config)
    orders = {tree.name: _order(options, base, tree) for tree in trees}
    dirty = " + uncommitted changes" if head.commit.dirty else ""
    reporter.say(f"base {base.commit.id[:10]}, head {head.commit.id[:10]}{dirty}")
    if compare and options.kind.counted:
        try:
            compare_traces(options, trees, orders, evidence, reporter)
            evidence.counted = count_both(options.kind, trees, orders, reporter)
            if evidence.counted.by_counter:
                evidence.notes += evidence.counted.faults
            else:
                evidence.incomplete += evidence.counted.faults
        except WorkerLost as error:
            evidence.incomplete.append(str(error))
    if evidence.not_comparable or evidence.incomplete:
        return
    evidence.before = state.read_state(devices)
    try:
        _launch_all(options, trees, orders, evidence, reporter)
    except WorkerLost as error:
        evidence.incomplete.append(str(error))
    evidence.after = state.with_seen(state.read_state(devices), evidence.seen)


def _launch_all(
    options: Options,
    trees: Sequence[Tree],
    orders: Mapping[str, Mapping[str, Any]],
    evidence: GateEvidence,
    reporter: Reporter,
) -> None:
    """One pair of processes after the other, until the answer is clear or the time is up. Raises
    WorkerLost."""
    count = options.launches or _between(LAUNCHES, round(options.minutes / LAUNCH_MINUTES))
    reporter.say(
        f"plan: {count} launches of base and head, which take turns segment by segment; about "
        f"{human_time(options.time_s)} in all"
    )
    started = time.monotonic()
    for number in range(count):
        left_s = options.time_s - (time.monotonic() - started)
        found = launch(
            trees,
            orders,
            number,
            left_s / (count - number),
            reporter,
            devices=options.kind.devices(options.config),
            seed=options.seed + number,
            least_pairs=LEAST_PAIRS,
            what=f"launch {number + 1} of at most {count}",
        )
        evidence.add(found, options)
        done = launches_clear(evidence.pairs, HEAD, evidence.seconds_per, options.budget_percent)
        if number + 1 < count and done:
            evidence.stopped = "clear"
            return
    evidence.stopped = "time"


def _between(limits: tuple[int, int], value: int) -> int:
    return min(limits[1], max(limits[0], value))


def _order(options: Options, base: Tree, tree: Tree) -> dict[str, Any]:
    """The first message to a worker."""
    kind = options.kind
    config = kind.to_order(options.config, lambda shared, code: _cache(shared, code, base, tree))
    inject = options.inject if tree.name == HEAD else ""
    return {"subject": kind.name, "config": config, "inject": inject, "trace_steps": 0}


def _cache(shared: Path, code: str, base: Tree, tree: Tree) -> Path:
    """Prepared data is shared, unless the code that prepares it differs: then base makes its own beside its
    worktree."""
    if tree is not base:
        return shared
    # A self-check runs this very tree against itself, changes and all: it has no worktree to put another
    # cache beside.
    same = base.root == ROOT or git("diff", "--quiet", base.commit.id, "--", code) is not None
    return shared if same else base.root.parent / "cache"


def compare_traces(
    options: Options,
    trees: Sequence[Tree],
    orders: Mapping[str, Mapping[str, Any]],
    evidence: GateEvidence,
    reporter: Reporter,
) -> None:
    """The first steps of real training in both trees, side by side. Raises WorkerLost."""
    steps = options.compare_steps
    reporter.say(f"comparing the losses of the first {steps} training steps of both")
    workers = []
    try:
        for tree in trees:
            workers.append(WorkerProcess(tree, {**orders[tree.name], "trace_steps": steps}))
        base, head = (worker.trace() for worker in workers)
    finally:
        for worker in workers:
            worker.close()
    if len(base) < steps:
        evidence.incomplete.append(f"incomplete: only {len(base)} of {steps} traced steps have a loss")
        return
    evidence.compared_steps = steps
    for name, column in (("loss", 1), ("gradient norm", 2)):
        found = compare_losses(
            [row[column] for row in base],
            [row[column] for row in head],
            options.numerics,
            reason=options.numerics_reason,
            of=f"{name} of step",
        )
        if found.refused:
            evidence.not_comparable.append(f"not comparable, training differs: {found.refused}")
            return
        evidence.accepted += [found.accepted] if found.accepted else []


__all__ = ["BASE", "HEAD", "compare_traces", "gather"]
