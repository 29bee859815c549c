"""The run: builds the parts, starts one thread per device, waits, ends in order."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from dflash.data.batch import Batch, BatchSpec
from dflash.data.collate import Collator
from dflash.data.plan import EpochPlan, Plan
from dflash.data.prefetch import BatchPrefetcher
from dflash.device import Device
from dflash.observe.observer import Observer
from dflash.observe.syncs import NO_SCOPES, Scopes, allowed_sync, mark_step
from dflash.pipeline import checkpoint
from dflash.pipeline.build import Inputs, build_replica, flops_of, load_targets, threads_per_worker
from dflash.pipeline.drafter_worker import DrafterWorker, Replica, StepHooks
from dflash.pipeline.hand_over import Receiver, through_host
from dflash.pipeline.heldout import Heldout
from dflash.pipeline.hidden_queue import SharedHiddenStateQueue
from dflash.pipeline.history import History
from dflash.pipeline.last_save import states_are_finite, whole_drafter
from dflash.pipeline.progress import Progress
from dflash.pipeline.rank_part import Alone, Among
from dflash.pipeline.reports import NonFiniteLoss
from dflash.pipeline.saver import restore
from dflash.pipeline.saving import Saving
from dflash.pipeline.scalars import LateScalars
from dflash.pipeline.scalars_log import StepScalars
from dflash.pipeline.supervisor import Supervisor
from dflash.pipeline.target_worker import TargetWorker
from dflash.pipeline.tau import Tau, make_tau
from dflash.pipeline.warmup import warm_up
from dflash.pipeline.watchdog import Watchdog, Watched, WorkerHung, watched
from dflash.ranks.world import World

_JOIN_S = 30.0
_POLL_S = 0.1


@dataclass
class TrainResult:
    """What a run leaves in memory.

    Attributes:
        scalars: one entry per optimizer step, in order; empty when the trainer was not to keep them.
        history: of the whole run, over all its legs.
        seconds: wall time of the workers, from first start to last end.
        tokens: real context tokens trained on.
        finished: all configured steps were done (not stopped before).
    """

    scalars: list[StepScalars] = field(default_factory=list)
    history: History = field(default_factory=History)
    seconds: float = 0.0
    tokens: int = 0
    finished: bool = False
    checkpoint: Path | None = None


class Trainer:
    """One training run in this process.

    Args:
        inputs: checked settings, shapes and data.
        run_dir: folder for checkpoints.
        observer: gets a recorder for each worker and the training scalars.
        scopes: entered by each worker thread around its loop (sync guard or counter).
        plan: which batches in which order; default: epochs over the data set.
        hooks: called in the drafters' steps, see `StepHooks`.
        resume: a checkpoint to go on from; its settings are those of `inputs.config`, see `resume`.
        keep_scalars: also keep every step's row in memory.
        spare_dir: where the last checkpoint goes when the run folder's disk is full.
        world: the ranks of the run, of which this process is one; None: it trains alone. Rank 0 restores the
            checkpoint and saves; on the others `resume` only says where the run stands.

    Raises:
        UserError: the checkpoint belongs to another drafter.
    """

    def __init__(
        self,
        inputs: Inputs,
        run_dir: Path,
        observer: Observer,
        *,
        scopes: Scopes = NO_SCOPES,
        plan: Plan | None = None,
        hooks: StepHooks | None = None,
        resume: checkpoint.State | None = None,
        save_checkpoints: bool = True,
        keep_scalars: bool = True,
        spare_dir: Path | None = None,
        world: World | None = None,
    ) -> None:
        self.inputs, self.config, self.run_dir, self.observer = inputs, inputs.config, run_dir, observer
        self.supervisor = Supervisor()
        self.result = TrainResult()
        self._scopes, self._hooks, self._save_checkpoints = scopes, hooks, save_checkpoints
        self._keep_scalars, self._spare_dir = keep_scalars, spare_dir
        self._base = resume.progress if resume else Progress()
        self.part = Alone(self.config) if world is None else Among(self.config, world, self._base)
        self._stop = threading.Event()
        self._build(plan, resume)

    # -- building --------------------------------------------------------------------------------------------

    def _build(self, plan: Plan | None, resume: checkpoint.State | None) -> None:
        config, inputs = self.config, self.inputs
        torch.set_num_threads(threads_per_worker(config))
        if plan is None:
            plan = EpochPlan(
                inputs.dataset.lengths, config.data.buckets, config.data.batch_size, config.data.seed
            )
        self.plan, drafters, part = plan, len(config.drafter.devices), self.part
        self._collator = Collator(
            inputs.dataset,
            inputs.geometry,
            pin=True,
            flops=flops_of(inputs),
            window=inputs.shape.sliding_window if inputs.shape.sliding_layers else None,
        )
        batches = (config.train.steps - self._base.step) * config.train.accumulation * drafters
        observer = self.observer
        self.prefetcher = BatchPrefetcher(
            part.plan(plan, self._base),
            self._collated,
            config.data.prefetch,
            stop_index=batches,
            recorder=observer.recorder("prefetcher", 0),
            on_error=lambda error: self.supervisor.fail("prefetcher", error),
            longest=config.data.max_length,
        )
        self.queue = SharedHiddenStateQueue(
            config.queue.capacity,
            config.queue.hs_min_ready,
            ordered=config.queue.ordered,
            drafters=drafters,
            targets=len(config.target.devices),
            per_step=config.train.accumulation,
            first_index=self._base.floor + part.share.place(0),
            stride=part.ranks * drafters,
            seed=config.train.seed,
        )
        self.exchange, self.scalars = part.exchange(), part.scalars()
        target_devices, targets = load_targets(config)
        self._targets = targets
        self._target_recorders = [
            observer.recorder("target", index, device) for index, device in enumerate(target_devices)
        ]
        self.replicas = [build_replica(inputs, targets[0], index) for index in range(drafters)]
        drafter_devices = [replica.device for replica in self.replicas]
        if resume is not None and part.first:
            restore(self.replicas, resume)
        part.equal_weights(self.replicas)
        share = -(-config.queue.capacity // len(targets))
        self.target_workers = [
            TargetWorker(
                index,
                target,
                device,
                self._target_recorders[index],
                self.prefetcher,
                self.queue,
                buffers=share + 1 + drafters,
                batch_size=config.data.batch_size,
                max_length=config.data.max_length,
                dtype=self.replicas[0].flat.working.dtype,
                keep_last=self.replicas[0].objective.needs_teacher,
                through_host=through_host(config.queue.hand_over, device, drafter_devices),
            )
            for index, (target, device) in enumerate(zip(targets, target_devices, strict=True))
        ]
        self.reports = part.reports(
            self.scalars,
            observer,
            config.train,
            resume,
            sample_ids=self.sample_ids,
            saw=lambda step: None if self.saving is None else self.saving.saw(step),
            behind=lambda: None if self.saving is None else self.saving.report_heldout(),
            keep=self.result.scalars if self._keep_scalars else None,
        )
        self.result.history = self.reports.history
        self.saving: Saving | None = self._make_saving() if self._save_checkpoints and part.first else None
        self.drafter_workers = [self._drafter_worker(replica) for replica in self.replicas]
        warm_up(self.target_workers, self.drafter_workers, inputs)
        observer.attach(queue=self.queue, prefetcher=self.prefetcher)
        observer.watch(self._scopes)
        self.supervisor.on_stop(self._wake_all)

    def _make_saving(self) -> Saving:
        return Saving(
            self.inputs,
            self.run_dir,
            self.observer,
            self.replicas,
            self._base,
            history_at=self.reports.history_at,
            history=self.reports.history,
            on_error=partial(self.supervisor.fail, "checkpoint writer"),
            spare=self._spare_dir,
            heldout=self._make_heldout() if self.config.data.heldout else None,
            tau=self._make_tau() if self.config.data.heldout and self.config.train.tau_prompts else None,
            ranks=self.part.ranks,
            places=self.part.places,
        )

    def _make_heldout(self) -> Heldout:
        heldout = Heldout(
            self.inputs, self._targets[0], Device(self.config.target.devices[0]), self.replicas[0]
        )
        self.observer.charge(heldout.account)
        return heldout

    def _make_tau(self) -> Tau | None:
        tau = make_tau(self.inputs, self._targets[0], self.replicas[0], self.supervisor.stopping)
        if tau is not None:
            self.observer.charge(tau.account)
        return tau

    def _drafter_worker(self, replica: Replica) -> DrafterWorker:
        index, config = replica.index, self.config
        saving, places = self.saving, self.part.places
        logs = self.part.logs(None if saving is None else saving.logs)
        width = self.scalars.width
        replica.device.copies_from(
            [worker.device for worker in self.target_workers] + [other.device for other in self.replicas]
        )
        return DrafterWorker(
            replica,
            self.observer.recorder("drafter", index, replica.device),
            self.queue,
            self.exchange,
            Receiver(replica.device, self.target_workers),
            LateScalars(replica.device, width, config.observe.ring),
            config.train,
            arrived=lambda entries: self.scalars.arrived(index, entries),
            hooks=self._hooks,
            stop=self._stop,
            checkpoint=self._boundary,
            wants_save=None if saving is None or places is None else saving.wants_save,
            first_step=self._base.step,
            consumed=None if logs is None else logs[index],
        )

    def _boundary(self, steps_done: int, save: bool) -> None:
        if self.saving is not None:
            self.saving.boundary(self.drafter_workers[0], save)
        else:
            self.part.boundary(steps_done, save)

    def _collated(self, spec: BatchSpec) -> Batch:
        with self._scopes.enter("prefetcher"):
            mark_step(spec.index)
            return self._collator(spec)

    def _wake_all(self) -> None:
        self.part.fail(self.supervisor.failure)
        self.queue.close()
        self.exchange.close()
        self.prefetcher.close()
        for worker in self.target_workers:
            worker.pool.close()

    # -- running ---------------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Finish the step under way, write a checkpoint, end."""
        self._stop.set()

    def run(self) -> TrainResult:
        """Train to the end.

        Raises:
            WorkerFailed: a worker raised or hung, or the user stopped at once; every other thread has been
                joined, and the state of the last whole step is saved where it could be.
        """
        self.reports.start()
        self.observer.start()
        self.part.listen(self.scalars, self.observer, self.supervisor)
        if self._base.step:
            self.observer.event(f"resumed from step {self._base.step}", resumed_from=self._base.step)
        watchdog = self._make_watchdog()
        try:
            self._start_workers()
            if self.config.train.hang_s:
                watchdog.start()
            while self.supervisor.running("drafter") and not self.supervisor.stopping.wait(_POLL_S):
                self.reports.note_stall()
                self.reports.take()
                self.part.look_after()
        except BaseException as error:
            self.supervisor.fail("main", error)
        finally:
            watchdog.stop()
            # When all is well the drafters have ended by themselves; whoever is left is waiting for them.
            self.supervisor.stop()
            failed = self.supervisor.failure.error if self.supervisor.failure else None
            hung = failed.role if isinstance(failed, WorkerHung) else ""
            left = self.supervisor.join(_JOIN_S, but=hung)
            if hung != "prefetcher":
                self.prefetcher.join(_JOIN_S)
            self._end(left)
        self.supervisor.raise_failure()
        return self.result

    def _end(self, left: list[str]) -> None:
        """The workers have ended, but for those `left`: count, save what can be saved."""
        result, supervisor = self.result, self.supervisor
        self.part.end(self.reports, self.drafter_workers[0])
        self._collect_late()
        if supervisor.failure is None and left:
            supervisor.fail("main", RuntimeError(f"workers did not stop: {', '.join(left)}"))
        failure = supervisor.failure
        worker = whole_drafter(self.drafter_workers, left, failure)
        result.tokens = (worker or self.drafter_workers[0]).tokens_done
        result.seconds = self.reports.end(result.tokens)
        result.finished = failure is None and self.drafter_workers[0].step_index >= self.config.train.steps
        error = failure.error if failure is not None else None
        if self.saving is not None:
            bad = isinstance(error, NonFiniteLoss)
            result.checkpoint = self.saving.abandon() if bad else self.saving.end(worker, self._stop)
        if isinstance(error, NonFiniteLoss):
            self._blame(error)

    def _collect_late(self) -> None:
        failure = self.supervisor.failure
        if failure is not None and isinstance(failure.error, NonFiniteLoss):
            return  # what came behind it is of no use
        try:
            self.reports.take(final=True)
        except NonFiniteLoss as error:
            self.supervisor.fail("main", error)

    def _blame(self, error: NonFiniteLoss) -> None:
        """Say where a NaN began, now that nobody is in a hurry."""
        batches = [self._collator(self.plan.spec(index)) for index in error.plan_indices]
        finite = states_are_finite(self._targets[0], self.target_workers[0].device, batches)
        if finite is not None:
            what = "are finite: it began behind the target" if finite else "are not finite: it begins there"
            error.args = (f"{error}; the target's hidden states of these batches {what}",)

    def _make_watchdog(self) -> Watchdog:
        tau = self.saving.tau if self.saving is not None else None
        counters = self.queue.counters

        def now() -> list[Watched]:
            moves = counters.get_count + (tau.decoded if tau is not None else 0)
            threads = self.supervisor.threads()
            return watched(threads, self.prefetcher, self._target_recorders, self.drafter_workers, moves)

        return Watchdog(self.config.train.hang_s, now, lambda hung: self.supervisor.fail(hung.role, hung))

    def _start_workers(self) -> None:
        self.prefetcher.start()
        if self.saving is not None:
            self.saving.start()
        workers: list[TargetWorker | DrafterWorker] = [*self.target_workers, *self.drafter_workers]
        for worker in workers:
            role = f"{'target' if isinstance(worker, TargetWorker) else 'drafter'}/{worker.index}"
            self.supervisor.spawn(role, partial(self._live, role, worker))

    def _live(self, role: str, worker: TargetWorker | DrafterWorker) -> None:
        with worker.device.active(), self._scopes.enter(role, worker.device):
            try:
                worker.run()
            except BaseException:
                # What its steps reported is still wanted; after a fault of the device there is none.
                with contextlib.suppress(Exception):
                    self._drain(worker)
                raise
            self._drain(worker)
            worker.end()

    def _drain(self, worker: TargetWorker | DrafterWorker) -> None:
        if isinstance(worker, DrafterWorker):
            with allowed_sync("end of the run: the last scalars"):
                self.scalars.arrived(worker.index, worker.late.drain_blocking())
                if worker.index == 0 and self.saving is not None and self.saving.heldout is not None:
                    self.saving.heldout.drain()

    def stands_full(self) -> bool:
        """Every target worker and the prefetcher have done all they can, and wait for the drafters. For the
        harness; no lock."""
        waiting_for_room = sum(not worker.pool.starved() for worker in self.target_workers)
        return self.prefetcher.stands_full() and self.queue.stands_full(waiting_for_room)

    def sample_ids(self, plan_index: int) -> tuple[int, ...]:
        """Rows of the data set in a batch of the plan."""
        return self.plan.spec(plan_index).sample_ids
