"""Both commits are measured: a pair of processes for each launch, until the answer is clear or the time is
up.

Two persistent worker processes, one of each commit, take turns segment by segment, so both see the same
minutes of the machine. They are launched anew a few times, since what a process got for its life (addresses,
pages, threads on cores) differs between launches and not within one: the launch pair is the unit of the
interval."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.gate.counters import count_both
from bench.gate.verdict import BASE, HEAD, GateEvidence, Launch, Options
from bench.gate.worker_process import WorkerLost, WorkerProcess
from bench.gate.worktrees import Tree
from bench.machine import identity, state
from bench.machine.commit import ROOT, git
from bench.machine.gpu_watch import GpuWatch
from bench.measure.plan import size
from bench.measure.runner import INTERRUPTED, PILOT_CYCLES, typical_step
from bench.progress import Reporter, human_time
from bench.records.types import Arm
from bench.statistics.stopping import SHARE_OF_BUDGET
from bench.subjects.losses import LossCheck, check_losses
from bench.subjects.protocol import SegmentRequest, Taken

LAUNCHES = (3, 10)
"""Fewest and most launches: the more there are, the surer the interval is of what differs between them."""
LAUNCH_MINUTES = 0.6
"""A launch for each. On two shared cores one costs 10 s and launches differ hardly more than their rounds do;
five in three minutes and ten in six are what docs/judging.md measured."""
BUILD_SHARE = 0.25
"""No more launches than leave building under this share of the time."""
MIN_LAUNCH_ROUNDS = 4
"""Rounds (of four segments) in a launch, at least."""
TRACE_STEPS = 12


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
        evidence.incomplete.append(f"interrupted after {len(evidence.segments)} segments")
        evidence.stopped = INTERRUPTED
    return evidence


def _gather(
    evidence: GateEvidence, options: Options, base: Tree, head: Tree, reporter: Reporter, compare: bool
) -> None:
    trees = (base, head)
    devices = options.kind.devices(options.config)
    evidence.machine = identity.identify(devices)
    orders = {tree.name: _order(options, base, tree) for tree in trees}
    reporter.say(
        f"base {base.commit.id[:10]}, head "
        f"{head.commit.id[:10]}{' + uncommitted changes' if head.commit.dirty else ''}"
    )
    if compare and options.kind.counted:
        try:
            compare_traces(trees, orders, evidence, reporter)
            evidence.counted = count_both(options.kind, trees, orders, reporter)
            if not evidence.counted.by_counter:
                evidence.incomplete += evidence.counted.faults
            else:
                evidence.notes += evidence.counted.faults
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
    started = time.monotonic()
    number = 0
    while number < count:
        if number >= LAUNCHES[0] and _clear(evidence, options.budget_percent):
            evidence.stopped = "clear"
            return
        left_s = options.time_s - (time.monotonic() - started)
        build_s = launch(options, trees, orders, evidence, number, left_s / (count - number), reporter)
        number += 1
        if number == 1 and not options.launches:
            count = min(count, _between(LAUNCHES, int(BUILD_SHARE * options.time_s / build_s)))
    evidence.stopped = "time"


def _between(limits: tuple[int, int], value: int) -> int:
    return min(limits[1], max(limits[0], value))


def _order(options: Options, base: Tree, tree: Tree) -> dict[str, Any]:
    """The first message to a worker."""
    kind = options.kind
    inject = options.inject_percent if tree.name == HEAD else 0.0
    config = kind.to_order(options.config, lambda shared, code: _cache(shared, code, base, tree))
    return {"subject": kind.name, "config": config, "inject_percent": inject, "trace_steps": 0}


def _cache(shared: Path, code: str, base: Tree, tree: Tree) -> Path:
    """Prepared data is shared, unless the code that prepares it differs: then base makes its own beside its
    worktree."""
    if tree is not base:
        return shared
    # A self-check runs this very tree against itself, changes and all: it has no worktree to put another
    # cache beside.
    same = base.root == ROOT or git("diff", "--quiet", base.commit.id, "--", code) is not None
    return shared if same else base.root.parent / "cache"


def _clear(evidence: GateEvidence, budget_percent: float) -> bool:
    found = evidence.interval()
    return found is not None and (found.high - found.low) / 2 <= SHARE_OF_BUDGET * budget_percent


# -- one pair of processes -----------------------------------------------------------------------------------


def launch(
    options: Options,
    trees: Sequence[Tree],
    orders: Mapping[str, Mapping[str, Any]],
    evidence: GateEvidence,
    number: int,
    time_s: float,
    reporter: Reporter,
) -> float:
    """Start both processes, let them take turns for `time_s` in all, end them. Returns the seconds that
    building took.

    Raises:
        WorkerLost: one of them died, hung, or does not fit the other.
    """
    started = time.monotonic()
    workers: list[WorkerProcess] = []
    try:
        for tree in trees:
            workers.append(WorkerProcess(tree, orders[tree.name]))
        for worker in workers:
            worker.greet()
        if workers[0].cycle != workers[1].cycle:
            raise WorkerLost(
                f"base replays {workers[0].cycle} steps, head {workers[1].cycle}: not comparable"
            )
        evidence.cycle = workers[0].cycle
        if number == 0 and all(worker.versions for worker in workers):
            other = identity.differences(workers[0].versions, workers[1].versions)
            evidence.notes += [f"head runs on other versions than base: {', '.join(other)}"] if other else []
        found = Launch()
        evidence.launches.append(found)
        build_s = time.monotonic() - started
        _take_turns(options, workers, evidence, found, number, time_s - build_s, reporter)
        return build_s
    finally:
        for worker in workers:
            worker.close()


def _take_turns(
    options: Options,
    workers: Sequence[WorkerProcess],
    evidence: GateEvidence,
    found: Launch,
    number: int,
    time_s: float,
    reporter: Reporter,
) -> None:
    arms = {worker.tree.name: Arm(worker.tree.name, frozenset(worker.collectors)) for worker in workers}
    by_name = {worker.tree.name: worker for worker in workers}
    washout = max(worker.washout for worker in workers)
    pilots = [
        worker.turn(
            SegmentRequest(
                arms[worker.tree.name], -1, 0, PILOT_CYCLES * worker.cycle, worker.warmup + worker.washout
            )
        )
        for worker in workers
    ]
    sizing = size(
        step_s=max(1e-9, sum(typical_step(pilot.segment, evidence.cycle) for pilot in pilots) / 2),
        cycle=evidence.cycle,
        segments_per_round=4,
        time_s=max(1.0, time_s),
        washout=washout,
        min_segment_s=options.min_segment_s,
        min_rounds=MIN_LAUNCH_ROUNDS,
    )
    if number == 0:
        reporter.say(
            f"plan: base and head take turns, {sizing.steps} steps ({sizing.segment_s:.2f} s) "
            f"each{f' after {washout} dropped' if washout else ''}; up to {sizing.rounds} rounds of four "
            f"turns in each launch, about {human_time(options.time_s)} in all"
        )
    taken: dict[str, list[Taken]] = {BASE: [], HEAD: []}
    gpus = GpuWatch(options.kind.devices(options.config))
    began = time.monotonic()
    reporter.begin("measuring")
    try:
        for index, order in enumerate(pairs(options.seed + number)):
            elapsed = time.monotonic() - began
            if index >= MIN_LAUNCH_ROUNDS and elapsed * (index + 1) / index > time_s:
                break
            share = min(
                0.99,
                max(
                    elapsed / max(time_s, 1e-9) if index >= MIN_LAUNCH_ROUNDS else 0.0, index / sizing.rounds
                ),
            )
            left = elapsed / share - elapsed if share > 0.02 else sizing.total_s
            reporter.advance(
                f"launch {number + 1}, round {index + 1} of at most {sizing.rounds}", share, left
            )
            for place, name in enumerate(order):
                request = SegmentRequest(arms[name], index, place, sizing.steps, washout)
                item = by_name[name].turn(request)
                taken[name].append(replace(item, segment=replace(item.segment, process=number)))
            gpus.look(now=index == 0)
    finally:
        reporter.end()
        evidence.seen += gpus.seen
    _close_launch(workers, evidence, found, taken)


def pairs(seed: int) -> Iterator[tuple[str, str, str, str]]:
    """Endless rounds ABBA or BAAB by the toss of a coin: linear drift inside a round cancels exactly."""
    generator = random.Random(seed)
    while True:
        first, second = (BASE, HEAD) if generator.random() < 0.5 else (HEAD, BASE)
        yield first, second, second, first


def _close_launch(
    workers: Sequence[WorkerProcess],
    evidence: GateEvidence,
    found: Launch,
    taken: Mapping[str, Sequence[Taken]],
) -> None:
    results = {worker.tree.name: worker.finish() for worker in workers}
    checks: dict[str, LossCheck] = {}
    for name, result in results.items():
        losses = [(int(step), float(loss)) for step, loss in result["losses"]]
        checks[name] = check_losses(taken[name], losses, evidence.cycle)
        found.losses |= checks[name].losses
        if checks[name].difference:
            evidence.not_comparable.append(f"{name} does not repeat itself: {checks[name].difference}")
        if result["peak_memory_bytes"]:
            found.memory_bytes[name] = int(result["peak_memory_bytes"])
        evidence.incomplete += [f"{name}: {fault}" for fault in result["faults"]]
        evidence.notes += [f"{name}: {note}" for note in result["notes"]]
    found.segments = sorted(
        (s for check in checks.values() for s in check.segments), key=lambda s: (s.round, s.order)
    )
    text = first_difference(found.losses.get(BASE, ()), found.losses.get(HEAD, ()), "batch {} of the cycle")
    if text:
        evidence.not_comparable.append(f"not comparable, the work differs: {text}")


# -- what is the same in both commits ------------------------------------------------------------------------


def first_difference(base: Sequence[float], head: Sequence[float], where: str) -> str:
    """The first place at which two traces differ, with both values; empty when they are equal to the last
    bit."""
    for place, (one, other) in enumerate(zip(base, head, strict=False)):
        if one != other:
            return f"{where.format(place)}: base {one!r}, head {other!r}"
    if len(base) != len(head):
        return f"base has {len(base)} values, head {len(head)}"
    return ""


def compare_traces(
    trees: Sequence[Tree], orders: Mapping[str, Mapping[str, Any]], evidence: GateEvidence, reporter: Reporter
) -> None:
    """The first steps of real training in both trees, side by side. Raises WorkerLost."""
    reporter.say(f"comparing the losses of the first {TRACE_STEPS} training steps of both")
    workers = []
    try:
        for tree in trees:
            workers.append(WorkerProcess(tree, {**orders[tree.name], "trace_steps": TRACE_STEPS}))
        base, head = (worker.trace() for worker in workers)
    finally:
        for worker in workers:
            worker.close()
    for name, column in (("loss", 1), ("gradient norm", 2)):
        text = first_difference(
            [row[column] for row in base], [row[column] for row in head], f"{name} of step {{}}"
        )
        if text:
            evidence.not_comparable.append(f"not comparable, training differs: {text}")
            return
    if len(base) < TRACE_STEPS:
        evidence.incomplete.append(f"incomplete: only {len(base)} of {TRACE_STEPS} traced steps have a loss")
