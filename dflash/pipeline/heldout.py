"""The drafter's loss on samples that it is not trained on, measured between two steps, without a sync.

The target is frozen, so its hidden states of the held-out batches are made once, before the workers start,
and wait in pinned host memory."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dflash.data.batch import Batch
from dflash.data.collate import Collator
from dflash.data.conversations import load_samples
from dflash.data.plan import EpochPlan
from dflash.device import Device
from dflash.observe.accounting import Account
from dflash.pipeline.build import Inputs
from dflash.pipeline.drafter_worker import Replica
from dflash.pipeline.scalars import LateScalars
from dflash.pipeline.scalars_log import StepScalars, join
from steptime.errors import UserError

if TYPE_CHECKING:
    from dflash.models.target import Target

NAME = "heldout"
_PENDING = 8


@dataclass(frozen=True)
class _Item:
    """A batch with its hidden states in pinned host memory, as in `HiddenBatch`."""

    batch: Batch
    features: torch.Tensor
    last: torch.Tensor | None


class Heldout:
    """Measures one replica. `look` and `poll` belong to its worker's thread, `take` to the main thread.

    Args:
        inputs: whose `config.data.heldout` names the file.
        target: makes the hidden states, here and now.

    Attributes:
        looks, host_ns: how often it was measured, and the host time that took.

    Raises:
        UserError: the file cannot be read, or holds no sample.
    """

    def __init__(self, inputs: Inputs, target: Target, device: Device, replica: Replica) -> None:
        data = inputs.config.data
        dataset = load_samples(
            data.model_copy(update={"path": data.heldout}),
            inputs.tokenizer,
            vocab_size=inputs.info.vocab_size,
        )
        if not len(dataset.samples):
            raise UserError(f"data.heldout = {data.heldout!r}: no sample in it")
        plan = EpochPlan(dataset.lengths, data.buckets, data.batch_size, seed=0)
        collate = Collator(dataset, inputs.geometry, pin=True)
        count = min(data.heldout_batches, -(-len(dataset.samples) // data.batch_size))
        dtype = replica.flat.working.dtype
        with device.active():
            self._items = [
                _states(collate(plan.spec(index)), target, device, dtype, replica.objective.needs_teacher)
                for index in range(count)
            ]
        self._replica, self._slots = replica, inputs.shape.block_size - 1
        self._width = 4 + 2 * self._slots + 1
        self._late = LateScalars(replica.device, self._width, _PENDING)
        self._arrived: deque[StepScalars] = deque()
        self.looks = self.host_ns = 0

    def look(self, steps_done: int) -> None:
        """Enqueue a measurement of the weights after `steps_done` steps. Never waits."""
        began_ns = time.perf_counter_ns()
        self._late.push(steps_done, torch.cat((self._measure(), self._replica.optimizer.steps.reshape(1))))
        self.looks += 1
        self.host_ns += time.perf_counter_ns() - began_ns

    def poll(self) -> None:
        """Take in the measurements that the device has finished."""
        if self._late.pending:
            self._keep(self._late.poll())

    def drain(self) -> None:
        """Take in all of them; waits for the device. At the end of a run."""
        self._keep(self._late.drain_blocking())

    def now(self) -> float:
        """The loss of the weights as they are, when nobody trains any more."""
        with self._replica.device.active():
            vector = torch.cat((self._measure(), self._replica.optimizer.steps.reshape(1))).cpu()
        return join(0, [vector.numpy()], (), self._slots).loss

    def take(self) -> list[StepScalars]:
        """What has arrived; `step` is the number of steps done."""
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def account(self, elapsed_s: float) -> Account:
        """What it has cost, as a collector's account: host time of the drafter's thread."""
        return Account(NAME, elapsed_s, 0, 0.0, self.host_ns / 1e9)

    def _measure(self) -> torch.Tensor:
        device = self._replica.device.torch
        total: torch.Tensor | None = None
        with torch.no_grad():
            for item in self._items:
                features = item.features.to(device, non_blocking=True)
                last = None if item.last is None else item.last.to(device, non_blocking=True)
                _, stats = self._replica.forward_loss(item.batch, features, last)
                total = stats if total is None else total + stats
        assert total is not None
        return total

    def _keep(self, rows: list[Any]) -> None:
        self._arrived.extend(join(row.step, [row.values], (), self._slots) for row in rows)


def metrics(row: StepScalars) -> dict[str, float]:
    """As `heldout/*` keys; what is not there is left out."""
    values = {f"{NAME}/loss": row.loss, f"{NAME}/accept_length": row.accept_length}
    slots = {f"{NAME}/slot_{k}_accuracy": a for k, a in enumerate(row.slot_accuracy, start=1)}
    return values | {key: value for key, value in slots.items() if not math.isnan(value)}


def _states(batch: Batch, target: Target, device: Device, dtype: torch.dtype, keep_last: bool) -> _Item:
    ids = batch.input_ids.to(device.torch)
    documents = None if batch.documents is None else batch.documents.to(device.torch)
    taps, last = target.taps_and_last(ids, documents) if keep_last else (target.taps(ids, documents), None)
    features = torch.cat([tap.to(dtype) for tap in taps], dim=-1)
    return _Item(
        batch, _on_host(features, device), None if last is None else _on_host(last.to(dtype), device)
    )


def _on_host(states: torch.Tensor, device: Device) -> torch.Tensor:
    host = device.pinned(tuple(states.shape), states.dtype)
    host.copy_(states)
    return host
