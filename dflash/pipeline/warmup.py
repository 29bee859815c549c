"""Every shape once, before the workers start: kernels compiled and tuned, caches filled, under one lock.

Compiling from several threads at once is a known race of `torch.compile`, and a first step that autotunes
would be measured as a slow one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dflash.data.batch import BatchSpec
from dflash.data.collate import Collator
from dflash.pipeline.hidden_queue import HiddenBatch

if TYPE_CHECKING:
    from dflash.pipeline.build import Inputs
    from dflash.pipeline.drafter_worker import Replica
    from dflash.pipeline.target_worker import TargetWorker


def warm_up(targets: Sequence[TargetWorker], replicas: Sequence[Replica], inputs: Inputs) -> None:
    """Run each target and each drafter on one batch of every bucket; weights and optimizer stay as they
    were."""
    config = inputs.config.data
    collate = Collator(inputs.dataset, inputs.geometry, pin=False)
    for bucket in config.buckets:
        fitting = [
            i for i, sample in enumerate(inputs.dataset.samples[:1000]) if len(sample.input_ids) <= bucket
        ]
        if not fitting:
            continue
        rows = tuple(fitting[index % len(fitting)] for index in range(config.batch_size))
        batch = collate(BatchSpec(index=0, anchor_seed=0, sample_ids=rows, bucket=bucket))
        for worker in targets:
            with worker.device.active():
                item = worker.hidden_states(batch)
                worker.device.synchronize()
            if worker is targets[0]:
                first = item
            else:
                item.buffer.release()
        for replica in replicas:
            _warm_drafter(replica, first)
        first.buffer.release()


def _warm_drafter(replica: Replica, item: HiddenBatch) -> None:
    with replica.device.active():
        loss, _ = replica.forward_loss(item, item.features.to(replica.device.torch))
        loss.backward()
        replica.flat.zero_grad()
        replica.device.synchronize()
