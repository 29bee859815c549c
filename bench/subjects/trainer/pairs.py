"""The real trainer, measured in pairs of segments: one persistent run that repeats a step's batches while its
switches are thrown.

A segment goes from drained barrier to drained barrier: at both ends the drafters stand at a step boundary,
the queue is full, every target worker waits with the next batch in hand, the prefetcher has built ahead all
it may, no device has work left, and monitor, collectors' threads and sinks are done. Batches that were built
under the former group are dropped in lead-in steps, so a segment of N steps holds N times the same batches in
every stage, whichever half of a pair it is."""

from __future__ import annotations

import contextlib
import gc
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.subjects.trainer import harness as shared
from bench.subjects.trainer.control import Controls
from bench.subjects.trainer.groups import GroupPlan
from bench.subjects.trainer.injected import Injected, InjectedSink
from bench.subjects.trainer.stage_speed import slowest_stage
from dflash.config import Config
from dflash.observe.accounting import Account
from steptime.machine.cores import OwnCores
from steptime.records.pairs import CONTROL, PLACEBO, Layer, Request
from steptime.regions import CompileWatch
from steptime.subjects.injection import Injection, Place
from steptime.subjects.pairs import OnSegment, PairStepper, Round, Stretch, Wanted
from steptime.subjects.protocol import HostMarks, SubjectResult
from steptime.timeline.picture import Picture, Rounds

if TYPE_CHECKING:
    from dflash.observe.observer import Observer
    from dflash.observe.timeline.log import Timeline
    from dflash.pipeline.build import Inputs
    from dflash.pipeline.trainer import Trainer

PRIMING_STEPS = 2
"""Steps after all instruments were switched on, so that every counter has moved before the first tick."""
LEAD_STEPS = 2
"""Steps of a round before those that its picture shows: what was handed over before it is drawn in them."""


class PairTrainer:
    """`PairSubject` over one trainer, with the step clock in drafter 0's step boundary.

    Args:
        config: the user's settings; measured as `harness_config(config)`.
        injections: known costs, each a switch of its own.
        plants: bad collectors out of `bench.syncs.faults.planted.PLANTED`, likewise.
        groups: steps in the cycle.
        time_stages: also time each stage alone, before the run.

    Attributes:
        pilot_switch: one more, no collector: a wait for the device in each step, by which the pilot finds how
            long a segment must be. None where no host runs ahead of its device.
    """

    def __init__(
        self,
        config: Config,
        *,
        injections: Sequence[Injection] = (),
        plants: Sequence[str] = (),
        groups: int = shared.CYCLE_STEPS,
        time_stages: bool = False,
    ) -> None:
        from bench.syncs.faults.planted import make_plant
        from dflash.observe.registry import COLLECTORS

        self.name = "trainer"
        self.config = shared.harness_config(config)
        self.groups, self.warmup = groups, max(8, 2 * groups)
        self.devices = (*self.config.target.devices, *self.config.drafter.devices)
        observe = self.config.observe
        self.periods: Mapping[Layer, float] = {Layer.TICK: observe.tick_s, Layer.FLUSH: observe.flush_s}
        self._injections = tuple(injections)
        self._planted = [make_plant(name) for name in plants]
        self.pilot_switch: str | None = None
        if any(name.startswith("cuda") for name in self.devices):
            wait = make_plant("item")
            wait.name = self.pilot_switch = "pilot"  # type: ignore[misc]
            self._planted.append(wait)
        own = [collector.name for collector in COLLECTORS]
        planted = tuple(one.name for one in self._planted if one.name != self.pilot_switch)
        # On a GPU a wait of the host hides behind its device, and one of the stream was never tried.
        self.controlled = self.pilot_switch is None
        self.controls = Controls()
        self.collectors = (*own, *planted, *(one.name for one in self._injections))
        self.switches = (*self.collectors, PLACEBO)
        self.layers: Mapping[str, frozenset[Layer]] = (
            {one.name: frozenset(Layer(part) for part in one.layers) for one in COLLECTORS}
            | dict.fromkeys(planted, frozenset(Layer))
            | {one.name: frozenset({one.layer}) for one in self._injections}
            | {PLACEBO: frozenset()}
        )
        self._time_stages = time_stages
        self._cleanup = contextlib.ExitStack()
        self._barrier = shared.DrainedBarrier(self.warmup - 1)
        self.trainer: Trainer | None = None
        self.observer: Observer | None = None
        self._injected: list[Injected] = []
        self._stepper: PairStepper | None = None
        self._tokens: list[int] = []
        self._compiles = CompileWatch()
        self._step_s = 0.0
        self._read_step = 0
        self._primed = False
        self._flushes = self._until = 0
        self._before: list[Account] = []
        self._recorded: tuple[str, Timeline] | None = None
        self._pictures: dict[str, Picture] = {}
        self.accounted_percent: dict[str, float] | None = None

    def open(self) -> None:
        """Read the data, build target, drafter, queue and observer; nothing runs yet."""
        from dflash.observe.observer import Observer, make_sinks
        from dflash.observe.roles import RoleMap
        from dflash.pipeline.build import prepare_inputs
        from dflash.pipeline.trainer import Trainer

        inputs = prepare_inputs(self.config)
        run_dir = Path(self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="dflash-bench-")))
        roles = RoleMap.from_config(self.config)
        sinks = make_sinks(self.config.observe, run_dir, roles)
        if any(one.place is Place.SINK for one in self._injections):
            sinks.append(InjectedSink(self._injections))
        self.observer = Observer(self.config.observe, run_dir, roles, sinks=sinks)
        self._cleanup.callback(self.observer.close)
        self.plan = self._group_plan(inputs)
        hooks: Any = self
        for plant in self._planted:
            hooks = plant.hooks(hooks)
        self.trainer = Trainer(
            inputs,
            run_dir,
            self.observer,
            plan=self.plan,
            hooks=hooks,
            scopes=OwnCores(shared.single_threaded_roles(self.config)),
            save_checkpoints=False,
        )
        for plant in self._planted:
            plant.install(self.trainer)
        if self.controlled:
            self.controls.hang(self.observer.recorders)
        for one in self._injections:
            built = self.observer.add(partial(Injected, injection=one))
            assert isinstance(built, Injected)
            self._injected.append(built)

    def _group_plan(self, inputs: Inputs) -> GroupPlan:
        from dflash.data.plan import EpochPlan

        data, lengths = self.config.data, inputs.dataset.lengths
        per_step = len(self.config.drafter.devices) * self.config.train.accumulation
        epochs = EpochPlan(lengths, data.buckets, data.batch_size, data.seed)
        start = shared.typical_window(epochs, lengths, self.groups * per_step)
        plan = shared.From(epochs, start)
        rows = [plan.spec(index).sample_ids for index in range(self.groups * per_step)]
        tokens = [sum(int(lengths[row]) for row in one) for one in rows]
        self._tokens = [sum(tokens[at : at + per_step]) for at in range(0, len(tokens), per_step)]
        return GroupPlan(plan, self.groups, per_step)

    def run_pairs(self, requests: Iterator[Wanted], on_segment: OnSegment) -> SubjectResult:
        """Train until the requests end. Raises what a worker raised."""
        from dflash.observe.registry import COLLECTORS
        from dflash.observe.timeline.picture import COLOURS
        from dflash.pipeline.supervisor import WorkerFailed

        trainer, observer = self._built()
        device = trainer.replicas[0].device
        stage_tokens_per_second = slowest_stage(trainer, self.groups) if self._time_stages else None
        self._stepper = PairStepper(
            first_pause=self.warmup - 1,
            requests=requests,
            on_segment=on_segment,
            hands=self,
            marks=shared.CudaMarks(device) if device.is_cuda else HostMarks(),
            control_s=self.controls.take_s,
        )
        observer.hold_clock()
        self._throw(COLLECTORS.names)  # the warm-up is theirs, too
        gc.collect()
        gc.freeze()
        try:
            result = trainer.run()
        except WorkerFailed as failure:
            raise failure.failure.error from None
        finally:
            gc.unfreeze()
        summary, fault = observer.close(), observer.monitor_fault
        faults = [f"collector {name} switched itself off: {error}" for name, error in summary.failed.items()]
        if fault is not None:
            faults.append(f"a tick of the monitor failed: {type(fault).__name__}: {fault}")
        faults += self._compiles.told()
        dropped = [f"sink {name} dropped {count} rows" for name, count in summary.dropped.items() if count]
        return SubjectResult(
            losses=[(row.step, row.loss) for row in result.scalars],
            accounted_percent=self.accounted_percent,
            stage_tokens_per_second=stage_tokens_per_second,
            peak_memory_bytes=shared.peak_memory(device),
            notes=tuple(dropped),
            faults=tuple(faults),
            rounds=Rounds(self._pictures, COLOURS) if self._pictures else None,
        )

    def close(self) -> None:
        """Stop the observer and remove the run's folder."""
        self._cleanup.close()
        self.trainer = self.observer = None

    def _built(self) -> tuple[Trainer, Observer]:
        assert self.trainer is not None
        assert self.observer is not None
        return self.trainer, self.observer

    # -- the stepper's hands, in drafter 0's thread ----------------------------------------------------------

    def stand(self) -> None:
        from dflash.observe.syncs import allowed_sync

        trainer, _ = self._built()
        others = len(trainer.replicas) - 1
        self._barrier.wait(lambda: trainer.stands_full(), others, trainer.supervisor.stopping)
        with allowed_sync("end of a measured segment"):
            devices = [worker.device for worker in trainer.target_workers]
            for device in devices + [replica.device for replica in trainer.replicas]:
                device.synchronize()
        self._rest()

    def turn(self, request: Request, step: int) -> int:
        lead = max(0, self.plan.turn(request.group) - (step + 1))
        if request.layer is not Layer.PATH and not self._primed:
            self._prime(step)
            lead = max(lead, PRIMING_STEPS)
        return lead

    def ready(self, request: Request, step: int) -> None:
        _, observer = self._built()
        if request.layer is Layer.PATH:
            self._throw(request.on)
            self._primed = False
        self.controls.throw(CONTROL in request.on)
        # Young objects only: everything older was frozen, so this is cheap, and no half inherits another's
        # garbage.
        gc.collect()
        if request.layer is not Layer.PATH:
            # As many spans wait as do at a run's tick, however few steps the last tick is ago.
            share = self.periods[Layer.TICK] / (self._step_s * (step - self._read_step))
            observer.discard(request.on, flush=request.layer is Layer.FLUSH, share=share)
            self._read_step = step
            self._rest()
        for one in self._injected:
            for loss in one.losses:
                if loss.owner == "drafter/0":
                    loss.restart()

    def force(self, request: Request) -> None:
        _, observer = self._built()
        force = observer.force_flush if request.layer is Layer.FLUSH else observer.force_tick
        force(request.on)

    def resting(self) -> bool:
        return self._built()[1].idle

    def tokens(self, group: int) -> int:
        return self._tokens[group]

    def begin_stretch(self, stretch: Stretch, step: int) -> None:
        _, observer = self._built()
        self.plan.turn(None)
        self._prime(step)
        self._primed = False
        observer.force_tick()
        self._rest()
        self._before = observer.accounts()
        self._until = observer.flushes + stretch.flushes
        observer.release_clock()

    def stretched(self) -> bool:
        return self._built()[1].flushes >= self._until

    def end_stretch(self) -> None:
        _, observer = self._built()
        observer.hold_clock()
        self._rest()
        spent = [_since(*one) for one in zip(self._before, observer.accounts(), strict=True)]
        shares = {account.name: account.percent for account in spent}
        self.accounted_percent = {**shares, "all": sum(shares.values())}

    def begin_round(self, wanted: Round, step: int) -> int:
        from dflash.observe.timeline.log import Timeline

        _, observer = self._built()
        first = max(self.plan.turn(None), step + 1) + LEAD_STEPS
        first += -first % self.groups  # each picture begins with the same batches
        steps = first - (step + 1) + self.groups
        self._throw(wanted.on)
        self._primed = False
        ahead = self.config.queue.capacity + self.config.data.prefetch
        self._recorded = wanted.name, Timeline(steps, self.plan.per_step, ahead)
        gc.collect()
        observer.record(self._recorded[1])
        return steps

    def end_round(self) -> None:
        from dflash.observe.timeline.picture import picture

        assert self._recorded is not None
        self._built()[1].record(None)
        name, timeline = self._recorded
        self._recorded = None
        logs = {log.label: log.spans() for log in timeline.logs}
        self._pictures[name] = picture(logs, self.groups).from_zero()

    def _prime(self, step: int) -> None:
        """All instruments on, and every collector has something to count from."""
        self._throw(self.collectors)
        self._built()[1].discard()
        self._rest()
        self._read_step = step
        self._primed = True

    def _throw(self, on: Collection[str]) -> None:
        _, observer = self._built()
        for name in observer.switches():
            observer.switch(name, name in on)

    def _rest(self) -> None:
        """Until monitor, collectors' threads and sinks are done, or the run stops."""
        trainer, observer = self._built()
        _wait(lambda: observer.idle or trainer.supervisor.stopping.is_set())

    # -- hooks of the trainer --------------------------------------------------------------------------------

    def after_backward(self, loss: Any, step: int) -> None:
        """Nothing here."""

    def after_step(self, step: int, tokens: int) -> bool:
        """Step boundary of drafter 0; False ends the run."""
        stepper = self._stepper
        assert stepper is not None
        if step < self.warmup:
            self._time_warmup(step)
        stepper(step)
        if stepper.pause_step != self._barrier.step:
            self._barrier.move_on(stepper.pause_step)
        return not stepper.finished

    def after_step_of_others(self, step: int) -> None:
        """Step boundary of the others: stand there while drafter 0 does."""
        if step == self._barrier.step:
            self._barrier.stay(self._built()[0].supervisor.stopping)

    def _time_warmup(self, step: int) -> None:
        """Seconds of a step over the warm-up's last cycle."""
        now = time.perf_counter()
        if step == self.warmup - 1 - self.groups:
            self._step_s = now
        elif step == self.warmup - 1:
            self._compiles = CompileWatch()
            self._step_s = (now - self._step_s) / self.groups
            for one in self._injected:
                one.set_turns(self._step_s, self.plan.per_step)
            self.controls.set_turns(self._step_s, self.plan.per_step)


def _wait(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + shared.BARRIER_S
    while not done():
        if time.monotonic() > deadline:
            raise RuntimeError(
                "monitor, collectors' threads and sinks do not come to rest within "
                f"{shared.BARRIER_S:g} s at a segment's end"
            )
        time.sleep(shared.LOOK_S)


def _since(before: Account, now: Account) -> Account:
    """What was spent between the two."""
    return Account(
        now.name,
        now.on_s - before.on_s,
        now.calls - before.calls,
        now.call_ns,
        now.cpu_s - before.cpu_s,
    )
