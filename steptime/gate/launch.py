"""One pair of processes of a gate: base and head take turns, segment by segment, so both see the same minutes
of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from steptime.gate.worker_process import WorkerLost, WorkerProcess
from steptime.gate.worktrees import Tree
from steptime.machine import identity
from steptime.machine.gpu_watch import GpuWatch
from steptime.measure.conductor import Conductor, Look
from steptime.measure.lengths import Lengths, choose
from steptime.measure.run import seconds_per
from steptime.progress import Reporter
from steptime.records.pairs import Layer, Pair, Request, Segment
from steptime.records.types import GpuState
from steptime.statistics.design import Draw, best_shares, draws, shares_for
from steptime.subjects.group_losses import both, check_segments
from steptime.subjects.pairs import Wanted

BASE, HEAD = "base", "head"


@dataclass(slots=True)
class Launch:
    """What one pair of processes gave.

    Attributes:
        losses: side -> group -> its loss.
        repeats: what does not repeat itself, one line each.
        memory_bytes: peak of each side.
        build_s: that building both took.
    """

    pairs: list[Pair] = field(default_factory=list)
    losses: dict[str, dict[int, float]] = field(default_factory=dict)
    repeats: list[str] = field(default_factory=list)
    memory_bytes: dict[str, int] = field(default_factory=dict)
    seconds_per: dict[Layer, float] = field(default_factory=dict)
    lengths: Lengths | None = None
    seen: list[GpuState] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    build_s: float = 0.0
    minutes: float = 0.0


@dataclass(frozen=True, slots=True)
class _UntilTime:
    """A launch ends when its share of the time is up, and has a few blocks at least."""

    least_pairs: int

    def look(self, pairs: Sequence[Pair], elapsed_s: float, time_s: float) -> Look:
        return Look(elapsed_s >= time_s and len(pairs) >= self.least_pairs, "time", time_s - elapsed_s)


def launch(
    trees: Sequence[Tree],
    orders: Mapping[str, Mapping[str, Any]],
    number: int,
    time_s: float,
    reporter: Reporter,
    *,
    devices: Sequence[str],
    seed: int,
    least_pairs: int,
    what: str,
) -> Launch:
    """Start both processes, let them take turns until `time_s` in all is over, end them.

    Args:
        trees: base, head.
        devices: that the subject works on.
        least_pairs: that a launch takes, whatever the time.

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
        found = _take_turns(
            workers,
            number,
            started + time_s,
            reporter,
            devices=devices,
            seed=seed,
            least_pairs=least_pairs,
            what=what,
        )
        if number == 0 and all(worker.versions for worker in workers):
            other = identity.differences(workers[0].versions, workers[1].versions)
            found.notes += [f"head runs on other versions than base: {', '.join(other)}"] if other else []
        found.build_s = time.monotonic() - started - 60.0 * found.minutes
        return found
    finally:
        for worker in workers:
            worker.close()


def _take_turns(
    workers: Sequence[WorkerProcess],
    number: int,
    end_s: float,
    reporter: Reporter,
    *,
    devices: Sequence[str],
    seed: int,
    least_pairs: int,
    what: str,
) -> Launch:
    base, head = workers
    if base.groups != head.groups:
        raise WorkerLost(f"base replays {base.groups} groups of batches, head {head.groups}: not comparable")
    periods = {layer: base.periods[layer] for layer in base.periods if layer in head.periods}
    gpus = GpuWatch(devices)

    def draw(lengths: Lengths) -> Iterator[Draw]:
        lengths_s = {layer: lengths.pair_s(layer) for layer in lengths.steps}
        best = best_shares(lengths_s, seconds_per(periods))
        shares = shares_for(lengths_s, max(1.0, conductor.time_s), 0.0, best)
        return draws((HEAD,), seed, lengths_s, shares=shares, placebo=False)

    conductor = Conductor(
        switches=(HEAD,),
        events=tuple(periods),
        draw=draw,
        judge=_UntilTime(least_pairs),
        choose=choose,
        groups=base.groups,
        time_s=max(1.0, end_s - time.monotonic()),
        reporter=reporter,
        seed=seed,
        process=number,
        what=what,
        between=gpus.look,
    )
    conductor.run(_both(base, head))
    found = Launch(
        pairs=conductor.pairs,
        seconds_per=seconds_per(periods),
        lengths=conductor.lengths,
        seen=gpus.seen,
        minutes=conductor.pairs_s / 60.0,
    )
    _close(workers, found)
    return found


def _both(
    base: WorkerProcess, head: WorkerProcess
) -> Callable[[Iterator[Wanted], Callable[[Segment], None]], None]:
    """Both processes as one subject: the switch "head" says whose turn it is."""

    def run(requests: Iterator[Wanted], on_segment: Callable[[Segment], None]) -> None:
        for request in requests:
            assert isinstance(request, Request)
            on_segment((head if HEAD in request.on else base).turn(request))

    return run


def _close(workers: Sequence[WorkerProcess], found: Launch) -> None:
    """End both and lay their losses beside their segments."""
    equal: dict[int, list[bool | None]] = {pair.number: [] for pair in found.pairs}
    notes: dict[str, list[str]] = {}
    for worker in workers:
        name, result = worker.tree.name, worker.finish()
        own = [
            (pair.number, segment)
            for pair in found.pairs
            for segment in (pair.first, pair.second)
            if (HEAD in segment.on) == (name == HEAD)
        ]
        losses = [(int(step), float(loss)) for step, loss in result["losses"]]
        checked = check_segments([segment for _, segment in own], losses)
        for (place, _), same in zip(own, checked.equal, strict=True):
            equal[place].append(same)
        found.losses[name] = checked.by_group
        if checked.difference:
            found.repeats.append(f"{name} does not repeat itself: {checked.difference}")
        if result["peak_memory_bytes"]:
            found.memory_bytes[name] = int(result["peak_memory_bytes"])
        found.faults += [f"{name}: {fault}" for fault in result["faults"]]
        for note in result["notes"]:
            notes.setdefault(note, []).append(name)
    found.notes += [note if len(names) > 1 else f"{names[0]}: {note}" for note, names in notes.items()]
    found.pairs = [replace(pair, losses_equal=both(equal[pair.number])) for pair in found.pairs]
