"""One thread, one drafter replica: hidden states in, gradients averaged, weights moved. Reads no device value
on the host."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dflash.config import TrainConfig
from dflash.device import Device
from dflash.models.objectives.base import gather_teacher
from dflash.models.stack import Stack
from dflash.observe.syncs import mark_step
from dflash.observe.timeline.log import DRAW, QUEUE, STEP
from dflash.pipeline.exchange import ExchangeClosed, GradientExchange, Share
from dflash.pipeline.hidden_queue import HiddenBatch, SharedHiddenStateQueue
from dflash.pipeline.schedule import learning_rate

if TYPE_CHECKING:
    from dflash.data.batch import Batch
    from dflash.models.drafter import Drafter
    from dflash.models.objectives.base import BlockObjective
    from dflash.models.optimizer import FlatAdamW, FlatParameters
    from dflash.observe.recorder import WorkerRecorder
    from dflash.pipeline.hand_over import Receiver
    from dflash.pipeline.scalars import LateRow, LateScalars


class StepHooks(Protocol):
    """What the harness may hang into the drafters' steps, drafter 0's for the most part; the trainer's
    default is none."""

    def after_backward(self, loss: torch.Tensor, step: int) -> None: ...

    def after_step(self, step: int, tokens: int) -> bool:
        """At the step boundary: the optimizer's work is enqueued, nothing drawn yet. False: stop after the
        next step.

        Args:
            tokens: context tokens that all drafters together trained on in this step.
        """
        ...

    def after_step_of_others(self, step: int) -> None:
        """At the same boundary of each other drafter, in its thread. May wait for drafter 0."""
        ...


@dataclass(frozen=True)
class Replica:
    """A drafter and all that trains it, on one device.

    Attributes:
        embedding, head: `[vocab, hidden]` of the target, frozen, on this device.
        nominal_weight: the weight sum of a batch with every slot supervised. Gradients are of loss_sum /
            nominal, so that bfloat16 gradients stay near one; the exact denominator comes in with the clip's
            factor.
    """

    index: int
    device: Device
    drafter: Drafter
    objective: BlockObjective
    flat: FlatParameters
    optimizer: FlatAdamW
    embedding: torch.Tensor
    head: torch.Tensor
    nominal_weight: float

    def forward_loss(
        self, batch: Batch, features: torch.Tensor, last_hidden: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss (0-dim, gradient of weighted sum / nominal) and the statistics vector, both on the device.

        Args:
            features, last_hidden: on this device, as in `HiddenBatch`.
        """
        device = self.device.torch
        anchors = batch.anchors.to(device, non_blocking=True)
        hidden = self.drafter(
            features,
            batch.input_ids.to(device, non_blocking=True),
            anchors,
            batch.keep.to(device, non_blocking=True),
            batch.document_start.to(device, non_blocking=True),
            self.embedding,
            batch.context_limits,
        )
        teacher = None
        if last_hidden is not None:
            teacher = gather_teacher(last_hidden, anchors, self.drafter.shape.block_size)
        labels = batch.labels.to(device, non_blocking=True)
        weights = batch.weights.to(device, non_blocking=True)
        return self.objective(hidden, self.head, labels, weights, 1.0 / self.nominal_weight, teacher)


class DrafterWorker:
    """Draws, runs the drafter forward and backward, sums gradients with the other drafters, steps the
    optimizer.

    Args:
        receiver: brings the batches to this device.
        late: ring through which the step's scalars reach the host, steps later.
        arrived: gets what has come out of the ring, `(step, vector, plan indices)`, in step order.
        hooks: the harness's; drafter 0 calls all of them but `after_step_of_others`.
        stop: when set, the step under way is the last one, for all drafters alike.
        checkpoint: called by drafter 0 at every boundary, with the number of steps done and whether the ranks
            agreed on a checkpoint there.
        wants_save: asked by drafter 0 of rank 0 whether a checkpoint is to be taken after so many steps; None
            where the other ranks need not know.
        consumed: gets (step, plan index) of each batch drawn, for whoever empties it (mixed order; in plan
            order the place is plain arithmetic).

    Attributes:
        copied: event of a checkpoint that is being copied out of the weights: they change behind it.
    """

    def __init__(
        self,
        replica: Replica,
        recorder: WorkerRecorder,
        queue: SharedHiddenStateQueue,
        exchange: GradientExchange,
        receiver: Receiver,
        late: LateScalars,
        config: TrainConfig,
        *,
        arrived: Callable[[list[LateRow]], None],
        hooks: StepHooks | None,
        stop: threading.Event,
        checkpoint: Callable[[int, bool], None],
        wants_save: Callable[[int], bool] | None = None,
        first_step: int = 0,
        consumed: deque[tuple[int, int]] | None = None,
    ) -> None:
        self.replica, self.index, self.device = replica, replica.index, replica.device
        self.late, self._receiver = late, receiver
        self.step_index = first_step
        self.tokens_done = 0
        self.copied: Any = None
        self._consumed, self._wants_save = consumed, wants_save
        self._recorder, self._queue, self._exchange, self._config = recorder, queue, exchange, config
        self._arrived, self._hooks, self._stop, self._checkpoint = arrived, hooks, stop, checkpoint
        self._get = recorder.timer("drafter.queue_get")
        self._forward = recorder.timer("drafter.forward", gpu=True)
        self._backward = recorder.timer("drafter.backward", gpu=True)
        self._optimize = recorder.timer("drafter.optimizer_step", gpu=True)
        # A sum of micro-batches in a buffer of its own is complete only behind the last backward.
        stack, self._announced_ns = replica.drafter.stack if exchange.overlaps else None, 0
        self._stack = stack if isinstance(stack, Stack) and replica.flat.wide_sum is None else None
        self._overlaps = self._stack is not None
        self._layers: list[tuple[int, int]] = []
        if self._overlaps:
            flat, layers = replica.flat, replica.drafter.shape.layers
            self._layers = [flat.span(f"layers.{layer}.") for layer in range(layers)]

    def run(self) -> None:
        """Until the configured number of steps, or the run stops."""
        try:
            with self._recorder.clock.running():
                self._exchange.join(self.index, self.replica.flat.grad, self.device)
                while self.step_index < self._config.steps and self.step():
                    pass
        except ExchangeClosed:
            return

    def end(self) -> None:
        """The loop is over: what of its spans the device has passed by now is read."""
        self._recorder.step_boundary()

    def warm(self, item: HiddenBatch) -> None:
        """Everything that a step launches, on the stream that will train; weights and optimizer stay as they
        were. Waits for the device; the target keeps its buffer."""
        replica = self.replica
        with self.device.active():
            features, last_hidden = self._receiver.receive(item, give_back=False)
            loss, _ = replica.forward_loss(item.batch, features, last_hidden)
            loss.backward()
            self._receiver.done(item, give_back=False)
            replica.flat.zero_grad()
            replica.optimizer.warm()
            self.device.synchronize()

    def step(self) -> bool:
        """One optimizer step. False when the run is over."""
        recorder, replica = self._recorder, self.replica
        mark_step(self.step_index)
        log = recorder.log
        stepped_ns = 0 if log is None else time.perf_counter_ns()
        replica.flat.zero_grad()
        weight, tokens, stats, plan_indices = 0.0, 0, None, []
        for index in range(self._config.accumulation):
            item = self._draw()
            if item is None:
                return False
            batch, last = item.batch, index + 1 == self._config.accumulation
            weight += batch.weight_sum
            tokens += batch.tokens
            plan_indices.append(batch.spec.index)
            began_ns = time.perf_counter_ns() if recorder.count else 0
            micro = self._micro_step(item, self._share(weight, tokens) if last and self._overlaps else None)
            replica.flat.end_micro_batch(last=last)
            stats = micro if stats is None else stats + micro
            if began_ns:
                recorder.batches += 1
                recorder.samples += len(batch.lengths)
                recorder.tokens += batch.tokens
                recorder.flops += batch.flops[1]
                recorder.busy_ns += time.perf_counter_ns() - began_ns - self._announced_ns
        assert stats is not None
        began_ns = time.perf_counter_ns() if recorder.count else 0
        recorder.wait_out_since_ns = began_ns
        total = self._exchange.sum(self.index, self._share(weight, tokens))
        exchanged_ns = time.perf_counter_ns() if began_ns else 0
        recorder.wait_out_since_ns = 0
        recorder.wait_out_ns += exchanged_ns - began_ns
        self._optimizer_step(total.weight, stats, tuple(plan_indices))
        if began_ns:
            recorder.busy_ns += time.perf_counter_ns() - exchanged_ns
        if log is not None:
            log.add("drafter.exchange", began_ns, exchanged_ns)
            log.add(STEP, stepped_ns, time.perf_counter_ns(), self.step_index)
        return self._boundary(total)

    def _share(self, weight: float, tokens: int) -> Share:
        save = self._wants_save is not None and self._wants_save(self.step_index + 1)
        return Share(weight, tokens, self._stop.is_set(), save)

    def _announce(self, share: Share) -> None:
        """The ranks agree on the step between its last forward and backward; from here on the sum of each
        layer's gradients begins as soon as they are complete."""
        recorder = self._recorder
        began_ns = recorder.wait_out_since_ns = time.perf_counter_ns() if recorder.count else 0
        self._exchange.announce(share)
        recorder.wait_out_since_ns = 0
        self._announced_ns = time.perf_counter_ns() - began_ns if began_ns else 0
        recorder.wait_out_ns += self._announced_ns
        assert self._stack is not None
        self._stack.after_layer = self._layer_done

    def _layer_done(self, layer: int) -> None:
        self._exchange.part(*self._layers[layer])
        if layer == 0:  # the backward's last
            assert self._stack is not None
            self._stack.after_layer = None

    def _boundary(self, total: Share) -> bool:
        step = self.step_index
        self.step_index += 1
        self.tokens_done += total.tokens
        recorder = self._recorder
        recorder.step = step
        recorder.step_boundary()
        if self.index == 0:
            if self._hooks is not None and not self._hooks.after_step(step, total.tokens):
                self._stop.set()
            self._checkpoint(self.step_index, total.save)
        elif self._hooks is not None:
            self._hooks.after_step_of_others(step)
        # Behind the checkpoint, which waits for the scalars of this step.
        self._arrived(self.late.poll())
        return not total.stop

    def _optimizer_step(self, weight: float, stats: torch.Tensor, plan_indices: tuple[int, ...]) -> None:
        timer = self._optimize
        if timer.on:
            timer.start()
        if self.copied is not None:
            self.copied.wait()
            self.copied = None
        scale = self.replica.nominal_weight / weight if weight > 0.0 else 0.0
        norm = self.replica.optimizer.step(learning_rate(self.step_index, self._config), scale)
        if timer.on:
            timer.stop()
        self.late.push(self.step_index, torch.cat((stats, norm.reshape(1))), plan_indices)

    def _draw(self) -> HiddenBatch | None:
        timer = self._get
        if timer.on:
            timer.start()
        recorder = self._recorder
        wanted_ns = time.perf_counter_ns() if recorder.count else 0
        recorder.wait_in_since_ns = wanted_ns
        item = self._queue.get(self.index)
        if wanted_ns:
            recorder.wait_in_since_ns = 0
            drawn_ns = time.perf_counter_ns()
            recorder.wait_in_ns += drawn_ns - wanted_ns
            if recorder.log is not None and item is not None:
                recorder.log.add(DRAW, drawn_ns, drawn_ns, item.batch.spec.index)
                recorder.log.add(QUEUE, drawn_ns, drawn_ns, self._queue.depth())
        if timer.on:
            timer.stop()
        if self._consumed is not None and item is not None:
            self._consumed.append((self.step_index, item.batch.spec.index))
        return item

    def _micro_step(self, item: HiddenBatch, announced: Share | None = None) -> torch.Tensor:
        forward, backward = self._forward, self._backward
        features, last_hidden = self._receiver.receive(item)
        if forward.on:
            forward.start()
        loss, stats = self.replica.forward_loss(item.batch, features, last_hidden)
        if forward.on:
            forward.stop()
        if announced is not None:
            self._announce(announced)
        if backward.on:
            backward.start()
        loss.backward()
        if backward.on:
            backward.stop()
        if self._hooks is not None and self.index == 0:
            self._hooks.after_backward(loss, self.step_index)
        # Backward reads the features (gradient of fc), so their memory is free only behind it.
        self._receiver.done(item)
        return stats
