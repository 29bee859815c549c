"""Every shape once, before the workers start: kernels compiled and tuned, caches filled, under one lock.

Compiling from several threads at once is a known race of `torch.compile`, and a first step that autotunes
would be measured as a slow one. It runs on the streams that will train, since the allocator's caches and
cuBLAS's workspaces belong to streams."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dflash.data.batch import BatchSpec
from dflash.data.collate import Collator

if TYPE_CHECKING:
    from dflash.pipeline.build import Inputs
    from dflash.pipeline.drafter_worker import DrafterWorker
    from dflash.pipeline.target_worker import TargetWorker

_COMPILING = threading.Lock()


def warm_up(targets: Sequence[TargetWorker], drafters: Sequence[DrafterWorker], inputs: Inputs) -> None:
    """Run each target and each drafter on one batch of every bucket; weights and optimizer stay as they
    were."""
    config = inputs.config.data
    collate = Collator(inputs.dataset, inputs.geometry, pin=False)
    with _COMPILING:
        for bucket in config.buckets:
            fitting = [
                i for i, sample in enumerate(inputs.dataset.samples[:1000]) if len(sample.input_ids) <= bucket
            ]
            if not fitting:
                continue
            rows = tuple(fitting[index % len(fitting)] for index in range(config.batch_size))
            batch = collate(BatchSpec(index=0, anchor_seed=0, sample_ids=rows, bucket=bucket))
            items = []
            for worker in targets:
                with worker.device.active():
                    items.append(worker.hidden_states(batch))
                    worker.device.synchronize()
            for drafter in drafters:
                drafter.warm(items[0])
            for item in items:
                item.buffer.release()
