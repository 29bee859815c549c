"""What each stage of the pipeline does alone, with the cores or the GPU that it has in it: the measure of the
pipeline.

A pipeline is as fast as its slowest stage at best. A target worker and a drafter are run by themselves over
the batches of the cycle, before the run starts: nothing else works meanwhile, so on a machine whose cores
share a memory bus or a power limit the stages alone are a little faster than they can ever be together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash.data.batch import Batch
    from dflash.pipeline.drafter_worker import Replica
    from dflash.pipeline.hidden_queue import HiddenBatch
    from dflash.pipeline.target_worker import TargetWorker
    from dflash.pipeline.trainer import Trainer

PASSES = 3


def slowest_stage(trainer: Trainer, steps: int) -> float:
    """Tokens per second of the slower of: all targets alone, all drafters alone. Call before `run`.

    Args:
        steps: steps in the cycle.
    """
    from dflash.data.collate import Collator

    inputs = trainer.inputs
    batches_per_step = len(trainer.replicas) * trainer.config.train.accumulation
    cuda = any(replica.device.is_cuda for replica in trainer.replicas)
    collate = Collator(inputs.dataset, inputs.geometry, pin=cuda)
    batches = [collate(trainer.plan.spec(index)) for index in range(steps * batches_per_step)]
    tokens = sum(batch.tokens for batch in batches)
    # Workers of a role are alike: the first one stands for all, and they share the batches evenly.
    target_s = sum(_target_seconds(trainer.target_workers[0], batches)) / len(trainer.target_workers)
    drafter_s = sum(_drafter_seconds(trainer, batches)) / len(trainer.replicas)
    return tokens / max(target_s, drafter_s)


def _target_seconds(worker: TargetWorker, batches: Sequence[Batch]) -> list[float]:
    def forward(batch: Batch) -> None:
        worker.hidden_states(batch).buffer.release()

    with worker.device.active():
        return [_median(lambda batch=batch: forward(batch), worker.device.synchronize) for batch in batches]  # type: ignore[misc]


def _drafter_seconds(trainer: Trainer, batches: Sequence[Batch]) -> list[float]:
    """Seconds of each batch, the optimizer's step shared out over the batches of a step. Weights stay: the
    rate is 0."""
    replica, worker = trainer.replicas[0], trainer.target_workers[0]
    found = []
    for batch in batches:
        with worker.device.active():
            item = worker.hidden_states(batch)
            worker.device.synchronize()
        with replica.device.active():
            found.append(_median(lambda item=item: _train(replica, item), replica.device.synchronize))  # type: ignore[misc]
            item.buffer.release()
    with replica.device.active():
        optimizer_s = _median(lambda: replica.optimizer.step(0.0, 0.0), replica.device.synchronize)
        replica.flat.zero_grad()
        replica.device.synchronize()
    share = optimizer_s / trainer.config.train.accumulation
    return [seconds + share for seconds in found]


def _train(replica: Replica, item: HiddenBatch) -> None:
    replica.flat.zero_grad()
    features, last = (
        None if tensor is None else tensor.to(replica.device.torch, non_blocking=True)
        for tensor in (item.features, item.last_hidden)
    )
    assert features is not None
    loss, _ = replica.forward_loss(item.batch, features, last)
    loss.backward()


def _median(work: Callable[[], object], synchronize: Callable[[], None]) -> float:
    times = []
    for _ in range(PASSES):
        start = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - start)
    return median(times)
