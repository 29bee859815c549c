"""When a run saves, and what: every so many steps behind the step, and at its end."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dflash.observe.observer import Observer
from dflash.pipeline.build import Inputs
from dflash.pipeline.checkpoint import State
from dflash.pipeline.drafter_worker import DrafterWorker, Replica
from dflash.pipeline.heldout import Heldout, metrics
from dflash.pipeline.history import History
from dflash.pipeline.last_save import LastSave
from dflash.pipeline.progress import FOLD_EVERY, Drawn, Progress
from dflash.pipeline.rank_mail import Places
from dflash.pipeline.resume import RANKS, fingerprint
from dflash.pipeline.run_folder import CHECKPOINTS
from dflash.pipeline.saver import CheckpointSaver, Order, mark_best
from dflash.pipeline.tau import Tau

_SETTLE_S = 5.0


class Saving:
    """The checkpoints of one run.

    Args:
        base: where the run began.
        history_at: the run's history, given the tokens that this leg has trained on.
        history: takes in what is measured.
        on_error: gets what nobody expected, from the writer's thread.
        spare: where the last checkpoint goes when the run folder's disk is full.
        ranks: of the run.
        places: where the ranks of a mixed run stand; None for an ordered one, and for one rank.

    Attributes:
        logs: what each drafter of a mixed run appends its draws to; None for an ordered one.
        saver: None when checkpoints are only written at the end.
    """

    def __init__(
        self,
        inputs: Inputs,
        run_dir: Path,
        observer: Observer,
        replicas: Sequence[Replica],
        base: Progress,
        *,
        history_at: Callable[[int], dict[str, Any]],
        history: History,
        on_error: Callable[[BaseException], None],
        spare: Path | None = None,
        heldout: Heldout | None = None,
        tau: Tau | None = None,
        ranks: int = 1,
        places: Places | None = None,
    ) -> None:
        self._inputs, self._base, self._observer = inputs, base, observer
        self._folder, self._train = run_dir / CHECKPOINTS, inputs.config.train
        self._history_at, self._history, self._spare = history_at, history, spare
        self.heldout, self.tau = heldout, tau
        self._batches_per_step = self._train.accumulation * len(replicas) * ranks
        self._samples = fingerprint(inputs.dataset)
        self._shape, self._settings = asdict(inputs.shape), inputs.config.leaves() | {RANKS: ranks}
        self._due, self._places = False, places
        ordered = inputs.config.queue.ordered
        self.logs: list[deque[tuple[int, int]]] | None = None if ordered else [deque() for _ in replicas]
        if places is not None:
            self.logs = places.logs
        self._drawn = None if self.logs is None or places is not None else Drawn(base, self.logs)
        self.saver: CheckpointSaver | None = None
        if self._train.checkpoint_every:
            self.saver = CheckpointSaver(
                self._folder,
                self._train.keep_checkpoints,
                replicas[0].optimizer,
                replicas[0].device,
                make_state=self._state,
                before=lambda: observer.settle(_SETTLE_S),
                told=observer.event,
                on_error=on_error,
                log=None if observer.timeline is None else observer.timeline.log("checkpoint writer"),
            )

    def start(self) -> None:
        """Start the writer's thread."""
        if self.saver is not None:
            self.saver.start()

    def wants_save(self, steps_done: int) -> bool:
        """Whether `boundary` will take a snapshot there; drafter 0's thread, before that step's end."""
        every = self._train.checkpoint_every
        if self.saver is None or steps_done >= self._train.steps:
            return False
        return (self._due or steps_done % every == 0) and self.saver.idle

    def boundary(self, worker: DrafterWorker, agreed: bool = False) -> None:
        """Between two steps of drafter 0, in its thread: a snapshot when one is due. Never waits: while the
        one before is being written the next is put off to a later step. Training stands still for `train/tau`
        alone.

        Args:
            agreed: the other ranks note their places here, for a snapshot.
        """
        steps_done = worker.step_index
        if self._drawn is not None and steps_done % FOLD_EVERY == 0:
            self._drawn.after(steps_done)
        saver, heldout, taken = self.saver, self.heldout, False
        if saver is not None:
            self._due = self._due or steps_done % self._train.checkpoint_every == 0
            if taken := self.wants_save(steps_done) if self._places is None else agreed:
                self._due = False
                order = Order(self._progress(steps_done), worker.tokens_done, measured=heldout is not None)
                worker.copied = saver.take(order)
        if heldout is not None:
            every = self._train.heldout_every
            due = taken or bool(every and steps_done % every == 0)
            decodes = self.tau is not None and (due or steps_done == self._train.steps)
            with self._observer.standing if due or decodes else contextlib.nullcontext():
                if due:
                    heldout.look(steps_done)
                heldout.poll()
                if self.tau is not None and decodes:
                    self.tau.look(steps_done)

    def report_heldout(self) -> None:
        """Measurements that have arrived, in the main thread."""
        if self.heldout is None:
            return
        if self.tau is not None:
            for look in self.tau.take():
                self._observer.late(look.step, look.metrics())
                self._history.decoded(look.step, look.tau, look.seconds)
        for row in self.heldout.take():
            self._observer.late(row.step, metrics(row))
            self._history.measured(row.loss)
            if self.saver is not None:
                self.saver.saw_heldout(row.step, row.loss)

    def saw(self, step: int) -> None:
        """The scalars of `step`, and of all before it, are finite; in the main thread."""
        if self.saver is not None:
            self.saver.saw(step, self._history_at)

    def end(self, worker: DrafterWorker | None, stop: threading.Event) -> Path | None:
        """The workers have ended: finish the checkpoint under way, and write that of the last whole step.

        Args:
            worker: a drafter whose weights are whole; None when there is none.
            stop: set by the user's next Ctrl-C.

        Returns:
            The newest checkpoint of this leg.
        """
        written = self._finish(drop=False)
        if worker is None:
            self._observer.event("the weights of the last step were lost with its worker")
            return written
        done = self.saver.written_step if self.saver is not None else 0
        if worker.step_index <= max(self._base.step, done):
            return written
        order = Order(self._progress(worker.step_index), worker.tokens_done)
        order.history = self._history_at(worker.tokens_done)
        self._observer.settle(_SETTLE_S)
        if self.heldout is not None:
            order.heldout = self.heldout.now()
            self._history.measured(order.heldout)
        last = LastSave(self._folder, self._spare, stop, self._observer.event)
        path = last.save(worker.replica, partial(self._state, order), self._train.keep_checkpoints)
        if path is not None and order.heldout is not None:
            mark_best(path, order.heldout)
        return path or written

    def abandon(self) -> Path | None:
        """The last weights are known to be bad: none of them are written."""
        return self._finish(drop=True)

    def _finish(self, *, drop: bool) -> Path | None:
        if self.saver is None:
            return None
        self.saver.close(self._history_at, drop=drop)
        return self.saver.written

    def _progress(self, steps_done: int) -> Progress:
        if self._places is not None:
            return self._places.own(steps_done)
        if self._drawn is not None:
            return self._drawn.after(steps_done)
        return Progress(steps_done, steps_done * self._batches_per_step)

    def _state(self, order: Order, tensors: dict[str, torch.Tensor]) -> State:
        history = (order.history or {}) | {"heldout": order.heldout}
        progress = order.progress
        if self._places is not None:
            progress = self._places.merged(progress, self._observer.event)
        return State(progress, tensors, self._shape, self._settings, self._samples, history)
