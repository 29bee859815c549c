"""The run: builds the parts, starts one thread per device, waits, ends in order."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch

from dflash.config import Config
from dflash.data.batch import Batch, BatchSpec
from dflash.data.collate import Collator
from dflash.data.plan import EpochPlan, Plan
from dflash.data.prefetch import BatchPrefetcher
from dflash.observe.observer import Observer
from dflash.observe.syncs import NO_SCOPES, Scopes, allowed_sync, mark_step
from dflash.pipeline import checkpoint
from dflash.pipeline.build import Inputs, build_replica, load_targets, threads_per_worker
from dflash.pipeline.drafter_worker import DrafterWorker, Replica, StepHooks
from dflash.pipeline.exchange import GradientExchange
from dflash.pipeline.hidden_queue import SharedHiddenStateQueue
from dflash.pipeline.scalars import LateScalars
from dflash.pipeline.scalars_log import ScalarsLog, StepScalars
from dflash.pipeline.schedule import learning_rate
from dflash.pipeline.supervisor import Supervisor
from dflash.pipeline.target_worker import TargetWorker
from dflash.pipeline.warmup import warm_up
from steptime.errors import UserError

_JOIN_S = 5.0
_POLL_S = 0.1


class NonFiniteLoss(RuntimeError):
    """The loss of a step was NaN or infinite; found late, from the ring, without a sync."""


@dataclass
class TrainResult:
    """What a run leaves in memory.

    Attributes:
        scalars: one entry per optimizer step, in order.
        seconds: wall time of the workers, from first start to last end.
        tokens: real context tokens trained on.
        finished: all configured steps were done (not stopped before).
    """

    scalars: list[StepScalars] = field(default_factory=list)
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
        resume: a checkpoint to go on from.
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
    ) -> None:
        self.inputs, self.config, self.run_dir, self.observer = inputs, inputs.config, run_dir, observer
        self.supervisor = Supervisor()
        self.result = TrainResult()
        self._scopes, self._hooks, self._save_checkpoints = scopes, hooks, save_checkpoints
        self._base = resume.progress if resume else checkpoint.Progress()
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
        drafters = len(config.drafter.devices)
        self._collator = Collator(inputs.dataset, inputs.geometry, pin=True)
        batches = (config.train.steps - self._base.step) * config.train.accumulation * drafters
        observer = self.observer
        self.prefetcher = BatchPrefetcher(
            checkpoint.RemainingPlan(plan, self._base),
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
            first_index=self._base.floor,
            seed=config.train.seed,
        )
        self.exchange = GradientExchange(drafters)
        self.scalars = ScalarsLog(drafters, config.drafter.block_size)
        target_devices, targets = load_targets(config)
        self.replicas = [build_replica(inputs, targets[0], index) for index in range(drafters)]
        if resume is not None:
            self._restore(resume)
        share = -(-config.queue.capacity // len(targets))
        self.target_workers = [
            TargetWorker(
                index,
                target,
                device,
                observer.recorder("target", index, device),
                self.prefetcher,
                self.queue,
                buffers=share + 1 + drafters,
                batch_size=config.data.batch_size,
                max_length=config.data.max_length,
                dtype=self.replicas[0].flat.working.dtype,
                keep_last=self.replicas[0].objective.needs_teacher,
            )
            for index, (target, device) in enumerate(zip(targets, target_devices, strict=True))
        ]
        self.drafter_workers = [self._drafter_worker(replica) for replica in self.replicas]
        warm_up(self.target_workers, self.replicas, inputs)
        observer.attach(queue=self.queue, prefetcher=self.prefetcher)
        observer.watch(self._scopes)
        self.supervisor.on_stop(self._wake_all)

    def _drafter_worker(self, replica: Replica) -> DrafterWorker:
        index, config = replica.index, self.config
        width = self.scalars.width
        return DrafterWorker(
            replica,
            self.observer.recorder("drafter", index, replica.device),
            self.queue,
            self.exchange,
            LateScalars(replica.device, width, config.observe.ring),
            config.train,
            arrived=lambda entries: self.scalars.arrived(index, entries),
            hooks=self._hooks,
            stop=self._stop,
            checkpoint=self._checkpoint,
            first_step=self._base.step,
            keep_consumed=not config.queue.ordered,
        )

    def _collated(self, spec: BatchSpec) -> Batch:
        with self._scopes.enter("prefetcher"):
            mark_step(spec.index)
            return self._collator(spec)

    def _restore(self, state: checkpoint.State) -> None:
        for replica in self.replicas:
            replica.optimizer.load_state_dict(checkpoint.unflatten(state.tensors))

    def _wake_all(self) -> None:
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
            WorkerFailed: a worker raised; every thread has been joined and the last checkpoint is whole.
        """
        started = time.perf_counter()
        self.observer.start()
        try:
            self._start_workers()
            while self.supervisor.running("drafter") and not self.supervisor.stopping.wait(_POLL_S):
                self._report()
        except BaseException as error:
            self.supervisor.fail("main", error)
        finally:
            # When all is well the drafters have ended by themselves; whoever is left is waiting for them.
            self.supervisor.stop()
            left = self.supervisor.join(_JOIN_S)
            self.prefetcher.join(_JOIN_S)
            self.result.seconds = time.perf_counter() - started
            self._collect_late()
        if self.supervisor.failure is None and left:
            self.supervisor.fail("main", RuntimeError(f"workers did not stop: {', '.join(left)}"))
        self.supervisor.raise_failure()
        self.result.tokens = self.drafter_workers[0].tokens_done
        self.result.finished = self.drafter_workers[0].step_index >= self.config.train.steps
        if self._save_checkpoints and self.drafter_workers[0].step_index > self._base.step:
            self.save(self.drafter_workers[0].step_index)
        return self.result

    def _start_workers(self) -> None:
        self.prefetcher.start()
        workers: list[TargetWorker | DrafterWorker] = [*self.target_workers, *self.drafter_workers]
        for worker in workers:
            role = f"{'target' if isinstance(worker, TargetWorker) else 'drafter'}/{worker.index}"
            self.supervisor.spawn(role, partial(self._live, role, worker))

    def _live(self, role: str, worker: TargetWorker | DrafterWorker) -> None:
        with worker.device.active(), self._scopes.enter(role, worker.device):
            worker.run()
            if isinstance(worker, DrafterWorker):
                with allowed_sync("end of the run: the last scalars"):
                    self.scalars.arrived(worker.index, worker.late.drain_blocking())

    def _report(self) -> None:
        for row in self.scalars.take():
            self.result.scalars.append(row)
            if not math.isfinite(row.loss):
                ids = [self.sample_ids(index) for index in row.plan_indices]
                raise NonFiniteLoss(
                    f"step {row.step}: loss is {row.loss}; batches {list(row.plan_indices)}, samples {ids}"
                )
            self.observer.late(row.step, row.metrics(learning_rate(row.step, self.config.train)))

    def stands_full(self) -> bool:
        """Every target worker and the prefetcher have done all they can, and wait for the drafters. For the
        harness; no lock."""
        waiting_for_room = sum(not worker.pool.starved() for worker in self.target_workers)
        return self.prefetcher.stands_full() and self.queue.stands_full(waiting_for_room)

    def sample_ids(self, plan_index: int) -> tuple[int, ...]:
        """Rows of the data set in a batch of the plan."""
        return self.prefetcher.plan_spec(plan_index).sample_ids

    def _collect_late(self) -> None:
        try:
            self._report()
        except NonFiniteLoss as error:
            if self.supervisor.failure is None:
                self.supervisor.fail("main", error)

    # -- checkpoints -----------------------------------------------------------------------------------------

    def _checkpoint(self, steps_done: int) -> None:
        every = self.config.train.checkpoint_every
        if (
            self._save_checkpoints
            and every > 0
            and steps_done % every == 0
            and steps_done < self.config.train.steps
        ):
            with allowed_sync("checkpoint"):
                self.save(steps_done)

    def save(self, steps_done: int) -> Path:
        """Write a checkpoint of the first `steps_done` steps; in drafter 0's thread, or when the workers have
        ended."""
        if self.config.queue.ordered:
            per_step = self.config.train.accumulation * len(self.replicas)
            progress = checkpoint.Progress(steps_done, steps_done * per_step)
        else:
            logs = [worker.consumed or [] for worker in self.drafter_workers]
            consumed = {index for log in logs for step, index in tuple(log) if step < steps_done}
            progress = checkpoint.progress_after(steps_done, self._base, consumed)
        state = checkpoint.State(
            progress,
            checkpoint.flatten(self.replicas[0].optimizer.state_dict()),
            asdict(self.inputs.shape),
            self.config.digest(),
        )
        self.result.checkpoint = checkpoint.save(
            self.run_dir / "checkpoints", state, self.config.train.keep_checkpoints
        )
        return self.result.checkpoint


def resume_state(run_dir: Path, config: Config) -> checkpoint.State | None:
    """The newest checkpoint of a run folder; None when it has none.

    Raises:
        UserError: the checkpoint belongs to other settings.
    """
    found = checkpoint.checkpoints(run_dir / "checkpoints")
    if not found:
        return None
    state = checkpoint.load(found[-1])
    if state.config_digest != config.digest():
        raise UserError(
            f"{found[-1]}: written with other settings (digest {state.config_digest}, now "
            f"{config.digest()}); use another --out"
        )
    return state
