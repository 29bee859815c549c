"""Checkpoints while training goes on: copied to host memory behind a step, without a sync, and written by a
thread."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dflash.device import Device
from dflash.models.optimizer import FlatAdamW, FlatParameters
from dflash.observe.timeline.log import SpanLog
from dflash.pipeline import checkpoint
from dflash.pipeline.checkpoint import NotWritten, State
from dflash.pipeline.progress import Progress

if TYPE_CHECKING:
    from dflash.pipeline.drafter_worker import Replica

_POLL_S = 0.01
_COPY_POLLS = 6000
_PIECE = 1 << 24
BUFFERS = ("master", "exp_avg", "exp_avg_sq")


def named_state(flat: FlatParameters, buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The optimizer's flat buffers as tensors by name, so that a checkpoint does not depend on the layout.

    Args:
        buffers: each of `BUFFERS`, `[n]`, and `steps`, a scalar; in host memory.
    """
    named = {"steps": buffers["steps"]}
    for key in BUFFERS:
        named |= {f"{key}/{name}": tensor for name, tensor in flat.named(buffers[key])}
    return named


def restore(replicas: Sequence[Replica], state: State) -> None:
    """Every replica's weights and moments from a checkpoint.

    Raises:
        UserError: it is of another drafter.
    """
    places = {name: shape for name, (_, shape) in replicas[0].flat.places.items()}
    shapes: dict[str, tuple[int, ...]] = {
        f"{key}/{name}": tuple(shape) for key in BUFFERS for name, shape in places.items()
    }
    checkpoint.check_fits(state, {"steps": (), **shapes})
    for replica in replicas:
        with replica.device.active():
            replica.optimizer.load_state_dict(checkpoint.unflatten(state.tensors))


def device_buffers(optimizer: FlatAdamW) -> dict[str, torch.Tensor]:
    """What a checkpoint holds, where it lives."""
    return {
        "steps": optimizer.steps,
        "master": optimizer.flat.master,
        "exp_avg": optimizer.exp_avg,
        "exp_avg_sq": optimizer.exp_avg_sq,
    }


def all_finite(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether no tensor in host memory holds a NaN or an infinity."""
    return all(
        bool(torch.isfinite(piece).all())  # sync: ok, host memory
        for tensor in tensors.values()
        for piece in tensor.reshape(-1).split(_PIECE)
    )


@dataclass
class Order:
    """A checkpoint on its way: what the step knew. `history` and `trusted` come later, from the main thread.

    Attributes:
        tokens: context tokens that this leg had trained on.
        history: the run's, up to this step.
        trusted: the scalars of its steps are finite, and so is the loss that its weights give.
        measured: its held-out loss is on its way, or `heldout` has it.
    """

    progress: Progress
    tokens: int
    history: dict[str, Any] | None = None
    trusted: bool = False
    measured: bool = False
    heldout: float | None = None

    @property
    def ready(self) -> bool:
        """All that comes later has come."""
        return self.trusted and (not self.measured or self.heldout is not None)


class CheckpointSaver:
    """Owned by the trainer. Drafter 0's thread takes snapshots, the main thread reports rows, a thread of its
    own writes.

    One snapshot exists at a time: as much host memory as masters and moments take, set aside at the start.

    Args:
        folder: where checkpoints go.
        keep: how many of the newest stay.
        make_state: an order and its tensors as the state that is written.
        before: called before a checkpoint appears: what its run reported before must be written first.
        told: gets one line for each checkpoint that could not be had.
        log: the writer's, for the timeline; None: there is none.
        on_error: gets what nobody expected.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        optimizer: FlatAdamW,
        device: Device,
        *,
        make_state: Callable[[Order, dict[str, torch.Tensor]], State],
        before: Callable[[], None],
        told: Callable[[str], None],
        on_error: Callable[[BaseException], None],
        log: SpanLog | None = None,
    ) -> None:
        self._log = log
        self.written: Path | None = None
        self.written_step = 0
        self.order: Order | None = None
        self.folder, self._keep = folder, keep
        self._make_state, self._before, self._told, self._on_error = make_state, before, told, on_error
        self._optimizer = optimizer
        self._done, self._copied = device.event(), device.event()
        self._device, self._side = device, device.new_stream()
        self._host = {
            name: device.pinned(tuple(tensor.shape), tensor.dtype)
            for name, tensor in device_buffers(optimizer).items()
        }
        self._orders: queue.Queue[Order | None] = queue.Queue()
        # Whoever has the snapshot's memory next knows that the other is done with it.
        self._turn = threading.Lock()
        self._ending = threading.Event()
        self._drop = False
        self.thread = threading.Thread(target=self._run, name="checkpoint writer", daemon=True)

    # -- drafter 0's thread ----------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """The last snapshot is written; there is room for another."""
        return self.order is None

    def take(self, order: Order) -> Any:
        """Enqueue the copies. Never waits.

        Returns:
            An event: the weights may change once it has fired. Have the stream wait for it, not the host.
        """
        with self._turn:
            self.order = order
        self._done.record()
        with self._device.on(self._side):
            self._done.wait()
            for name, tensor in device_buffers(self._optimizer).items():
                self._host[name].copy_(tensor, non_blocking=True)
            self._copied.record()
        self._orders.put(order)
        return self._copied

    # -- the main thread -------------------------------------------------------------------------------------

    def start(self) -> None:
        self.thread.start()

    def saw(self, step: int, history_at: Callable[[int], dict[str, Any]]) -> None:
        """The scalars of `step` were finite, and those of all steps before it."""
        order = self.order
        if order is None:
            return
        if order.history is None and step >= order.progress.step - 1:
            order.history = history_at(order.tokens)
        if step >= order.progress.step:
            order.trusted = True

    def saw_heldout(self, steps_done: int, loss: float) -> None:
        """The held-out loss of the weights after so many steps."""
        order = self.order
        if order is not None and order.progress.step == steps_done:
            order.heldout = loss

    def close(self, history_at: Callable[[int], dict[str, Any]], *, drop: bool) -> None:
        """No more snapshots will come. Waits until the one under way is written.

        Args:
            drop: its weights are known to be bad.
        """
        order = self.order
        if order is not None and order.history is None:
            order.history = history_at(order.tokens)
        self._drop = drop
        self._ending.set()
        self._orders.put(None)
        if self.thread.ident is not None:
            self.thread.join()

    # -- its own thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        with self._device.active():
            self._write_all()

    def _write_all(self) -> None:
        while (order := self._orders.get()) is not None:
            began_ns = time.perf_counter_ns()
            try:
                self._save(order)
                if self._log is not None:
                    self._log.add("checkpoint", began_ns, time.perf_counter_ns(), order.progress.step)
            except NotWritten as error:
                last = f"the last one is {self.written.name}" if self.written else "there is none yet"
                self._told(f"{error}; training goes on, {last}")
            except BaseException as error:
                self._on_error(error)
            finally:
                with self._turn:
                    self.order = None

    def _save(self, order: Order) -> None:
        while not order.ready and not self._ending.is_set():
            self._ending.wait(_POLL_S)
        for _ in range(_COPY_POLLS):
            if self._copied.query():
                break
            time.sleep(_POLL_S)
        else:
            self._told(f"the weights after {order.progress.step} steps could not be copied: the device hangs")
            return
        if not order.trusted and self._drop:
            return
        tensors = named_state(self._optimizer.flat, self._host)
        if not all_finite(tensors):
            self._told(f"the weights after {order.progress.step} steps are not finite: no checkpoint of them")
            return
        if not order.trusted and order.heldout is not None and not math.isfinite(order.heldout):
            return
        self._before()
        draft = checkpoint.write(self.folder, self._make_state(order, tensors))
        self.written, self.written_step = checkpoint.publish(draft), order.progress.step
        if order.heldout is not None:
            mark_best(self.written, order.heldout)
        checkpoint.prune(self.folder, self._keep)


def mark_best(path: Path, loss: float) -> None:
    """Have `best` lead to a checkpoint whose held-out loss is the lowest so far."""
    before = checkpoint.heldout_of(path.parent / checkpoint.BEST)
    if before is None or loss < before:
        checkpoint.mark(path, checkpoint.BEST)
