"""The proof: the real trainer with collectors off and on, every sync and every piece of device work counted,
exactly.

One run replays one cycle of batches. The first cycle warms every thread up; then each arm gets a washout,
long enough for whatever the other threads had begun under the former arm, and a whole number of cycles that
is counted. A worker's work is counted by the step it belongs to, not by the time at which it is done, so
integers of two arms can be compared for equality although the threads run freely."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dflash.config import Config
from dflash.observe.collectors.base import Collector, Sources
from dflash.observe.metric import Metric
from steptime.counting.cuda import CudaScopes, category, is_sync
from steptime.counting.difference import CountRow, Counts, difference
from steptime.records.types import CountedPlace, ExactCounts
from steptime.syncs.counting import CountingScopes
from steptime.syncs.scopes import (
    ALLOCATION,
    COPY_TO_DEVICE,
    COPY_TO_HOST,
    OPERATION,
    Key,
    Place,
)

if TYPE_CHECKING:
    from dflash.pipeline.trainer import Trainer

OFF = "off"
MONITOR = "monitor"
CYCLE = 4
"""Batches in the counted cycle: integers repeat, so few are enough."""
TICK_S = 0.02
"""The monitor ticks faster than in training, so that it does so several times in every arm."""
FLUSH_S = 3 * TICK_S
FLUSHES = 2
"""Least flushes of the monitor in an arm's counted steps: some collectors sample at a flush alone. The first
may have begun before those steps, or may be a collector's first reading, which starts its counts; the second
is a whole one, with all the ticks before it."""


@dataclass(frozen=True)
class Proof:
    """What a run counted.

    Attributes:
        counts: for each arm, (role, kind, place) -> number over `steps` steps.
        declared: (role, kind, place, reason) -> number, over the whole run.
        losses: of the counted steps of each arm, phase 0 first.
        unavailable: ways that could not be armed, with the reason.
    """

    steps: int
    counts: dict[str, Counts]
    declared: dict[tuple[str, str, Any, str], int]
    losses: dict[str, tuple[float, ...]]
    ways: tuple[str, ...]
    unavailable: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()

    def difference(self, arm: str, base: str = OFF) -> list[CountRow]:
        """What `arm` does that `base` does not, and the other way round."""
        return difference(self.counts[base], self.counts[arm])

    @property
    def losses_equal(self) -> bool:
        """Whether every arm had the same losses, bit for bit."""
        return len(set(self.losses.values())) <= 1

    def syncs(self, arm: str) -> int:
        """Undeclared host syncs of an arm."""
        return sum(n for (_, kind, _), n in self.counts[arm].items() if is_sync(kind))


class _Flushes(Collector):
    """Counts the monitor's flushes, so that a monitor that stands still is no proof of anything."""

    name = "proof-flushes"
    metrics: ClassVar[tuple[Metric, ...]] = ()

    def __init__(self, sources: Sources) -> None:
        super().__init__(sources)
        self.count = 0

    def sample(self, now_ns: int) -> dict[str, float]:
        return {}

    def flush(self) -> dict[str, float]:
        self.count += 1
        return {}


@dataclass
class _Windows:
    """Hooks of drafter 0: throws the switches, and tells the counted steps of each arm.

    Monitor and sinks have no steps of their own; what they do is charged to the arm that is being counted
    meanwhile.
    """

    arms: Mapping[str, Sequence[str]]
    cycle: int
    washout: int
    scopes: CountingScopes
    trainer: Trainer | None = None
    bounds: dict[str, tuple[int, int]] = field(default_factory=dict)
    flushes: Any = None
    _flushes: int = 0

    def __post_init__(self) -> None:
        self._pending = list(self.arms)
        self._end = self.cycle - 1  # the warm-up cycle ends
        self._begin = -1
        self._waited = threading.Event()

    @property
    def steps(self) -> int:
        """Steps that the whole run takes."""
        return self.cycle + len(self.arms) * (self.washout + self.cycle) + 1

    def after_backward(self, loss: Any, step: int) -> None:
        pass

    def after_step(self, step: int, tokens: int) -> bool:
        if step + 1 == self._begin:
            self._flushes = self.flushes.count
            self._charge_observer(step + 1)
        if step != self._end:
            return True
        self._wait_for_flushes()
        self._charge_observer(None)
        if not self._pending:
            return False
        self._throw(self._pending.pop(0), step)
        return True

    def after_step_of_others(self, step: int) -> None:
        pass

    def _throw(self, arm: str, step: int) -> None:
        assert self.trainer is not None
        observer = self.trainer.observer
        for name in observer.switches():
            observer.switch(name, name in self.arms[arm] or name == _Flushes.name)
        self._begin = step + 1 + self.washout
        self._end = self._begin + self.cycle - 1
        self.bounds[arm] = (self._begin, self._end + 1)

    def _charge_observer(self, step: int | None) -> None:
        for role, scope in self.scopes.entered.copy().items():
            if _stepless(role):
                scope.step = OUTSIDE if step is None else step

    def _wait_for_flushes(self) -> None:
        for _ in range(500):
            if self._begin < 0 or self.flushes.count - self._flushes >= FLUSHES:
                return
            self._waited.wait(TICK_S)
        raise RuntimeError("the monitor did not flush: its syncs cannot be counted")


OUTSIDE = -2
"""Step of what belongs to no arm."""


def _stepless(role: str) -> bool:
    """Whether a role marks no steps of its own."""
    return role == MONITOR or role.startswith("sink/")


def count_arms(
    config: Config, arms: Mapping[str, Sequence[str]], *, plants: Sequence[str] = (), cycle: int = CYCLE
) -> Proof:
    """Run the trainer once and count every arm.

    Args:
        config: as the harness runs it (ordered, learning rate 0, no sinks but JSONL).
        arms: name -> collectors that are on; "off" must be there.
        plants: bad collectors out of `bench.syncs.faults.planted.PLANTED`, each on in the arms that name it.
        cycle: batches in the cycle; that many steps of each arm are counted.
    """
    from bench.syncs.faults.planted import make_plant

    cuda = any(name.startswith("cuda") for name in (*config.target.devices, *config.drafter.devices))
    scopes = CudaScopes() if cuda else CountingScopes(cuda=False)
    config = _shallow(config)
    per_step = len(config.drafter.devices) * config.train.accumulation
    # Batches that may be on their way when a switch is thrown: waiting, in a worker's hands, or being
    # collated.
    depth = (
        config.queue.capacity
        + config.data.prefetch
        + len(config.target.devices)
        + 2 * len(config.drafter.devices)
        + 1
    )
    windows = _Windows(arms, cycle, washout=-(-depth // per_step) + 1, scopes=scopes)
    planted = [make_plant(name) for name in plants]
    with tempfile.TemporaryDirectory(prefix="dflash-proof-") as folder:
        hooks: Any = windows
        for plant in planted:
            hooks = plant.hooks(hooks)
        trainer = _trainer(config, windows.steps, cycle, Path(folder), scopes, hooks)
        windows.trainer = trainer
        for plant in planted:
            plant.install(trainer)
        windows.flushes = trainer.observer.add(_Flushes)  # the last: what it counts, the others have done
        scopes.arm()
        try:
            result = trainer.run()
        finally:
            failed = trainer.observer.close().failed
    scopes.disarm()
    if failed:
        name, why = next(iter(failed.items()))
        raise RuntimeError(f"not counted: collector {name} went off in the middle: {why}")
    missing = {*_roles(config), *trainer.observer.sink_roles} - set(scopes.entered)
    if missing:
        raise RuntimeError(f"not counted: {', '.join(sorted(missing))} never entered a scope")
    losses = {row.step: row.loss for row in result.scalars}
    events = scopes.events() if isinstance(scopes, CudaScopes) else scopes.ledger.counts
    return Proof(
        steps=cycle,
        counts={arm: _counted(events, bounds, per_step) for arm, bounds in windows.bounds.items()},
        declared=scopes.declared(),
        losses={arm: _turned(losses, *bounds, cycle) for arm, bounds in windows.bounds.items()},
        ways=("modes", *(scopes.ways if isinstance(scopes, CudaScopes) else ())),
        unavailable=scopes.unavailable if isinstance(scopes, CudaScopes) else (),
        roles=tuple(scopes.entered),
    )


def _shallow(config: Config) -> Config:
    """With a queue as short as may be: counts do not depend on it, and the washout is short."""
    least = max(len(config.drafter.devices), len(config.target.devices))
    queue = config.queue.model_copy(
        update={"capacity": least, "hs_min_ready": min(1, config.queue.hs_min_ready)}
    )
    return config.model_copy(update={"queue": queue, "data": config.data.model_copy(update={"prefetch": 1})})


def _trainer(
    config: Config, steps: int, cycle: int, folder: Path, scopes: CountingScopes, hooks: Any
) -> Trainer:
    from dflash.data.plan import CyclePlan, EpochPlan
    from dflash.observe.observer import Observer
    from dflash.observe.roles import RoleMap
    from dflash.pipeline.build import prepare_inputs
    from dflash.pipeline.trainer import Trainer

    config = config.model_copy(
        update={
            "train": config.train.model_copy(update={"steps": steps}),
            "observe": config.observe.model_copy(
                update={"tick_s": TICK_S, "flush_s": FLUSH_S, "collectors": ()}
            ),
        }
    )
    inputs = prepare_inputs(config)
    data = config.data
    per_step = len(config.drafter.devices) * config.train.accumulation
    plan = CyclePlan(
        EpochPlan(inputs.dataset.lengths, data.buckets, data.batch_size, data.seed), cycle * per_step
    )
    observer = Observer(config.observe, folder, RoleMap.from_config(config))
    return Trainer(inputs, folder, observer, scopes=scopes, plan=plan, hooks=hooks, save_checkpoints=False)


def _roles(config: Config) -> list[str]:
    targets = [f"target/{index}" for index in range(len(config.target.devices))]
    return [
        *targets,
        *(f"drafter/{index}" for index in range(len(config.drafter.devices))),
        "prefetcher",
        MONITOR,
    ]


def _counted(counts: Mapping[Key, int], bounds: tuple[int, int], per_step: int) -> Counts:
    """The counts of steps `bounds`; targets and prefetcher count batches, of which a step takes
    `per_step`."""
    found: Counts = {}
    for key, n in counts.items():
        scale = 1 if key.role.startswith("drafter") or _stepless(key.role) else per_step
        if bounds[0] * scale <= key.step < bounds[1] * scale:
            name = (key.role, key.kind, key.place)
            found[name] = found.get(name, 0) + n
    return found


def _turned(losses: Mapping[int, float], first: int, last: int, cycle: int) -> tuple[float, ...]:
    """The losses of whole cycles, those of phase 0 first."""
    by_phase = sorted((step % cycle, step) for step in range(first, last))
    return tuple(losses[step] for _, step in by_phase)


def exact_counts(proof: Proof) -> dict[str, ExactCounts]:
    """In the harness's words. Places are those that differ in some arm, every sync, and the declared ones of
    the whole run."""
    rows = [row for arm in proof.counts if OFF in proof.counts for row in proof.difference(arm)]
    changed = {(row.role, row.kind, row.place) for row in rows}
    return {arm: _exact(proof, arm, changed) for arm in proof.counts}


def _exact(proof: Proof, arm: str, changed: set[tuple[str, str, Place]]) -> ExactCounts:
    counts = proof.counts[arm]
    places = [
        CountedPlace(category(kind), role, f"{place} ({kind})", n, proof.steps)
        for (role, kind, place), n in sorted(counts.items(), key=str)
        if category(kind) in ("sync", "driver") or (role, kind, place) in changed
    ]
    places += [
        CountedPlace("declared", role, f"{place} ({kind}: {reason})", n, proof.steps)
        for (role, kind, place, reason), n in sorted(proof.declared.items(), key=str)
        if is_sync(kind)
    ]
    return ExactCounts(
        arm=arm,
        steps=proof.steps,
        armed=not proof.unavailable,
        syncs=proof.syncs(arm),
        operations=_sum(counts, OPERATION),
        copies=_sum(counts, COPY_TO_DEVICE, COPY_TO_HOST),
        allocations=_sum(counts, ALLOCATION),
        places=tuple(places),
        ways=proof.ways,
        unavailable=proof.unavailable,
    )


def _sum(counts: Counts, *kinds: str) -> int:
    return sum(n for (_, kind, _), n in counts.items() if kind in kinds)


__all__ = ["Proof", "count_arms", "exact_counts"]
