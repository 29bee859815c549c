"""The checkpoint at the end of a run, also of one that failed: the weights are never thrown away unasked."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import torch

from dflash.data.batch import Batch
from dflash.device import Device
from dflash.models.optimizer import FlatAdamW
from dflash.models.target import Target
from dflash.pipeline import checkpoint
from dflash.pipeline.checkpoint import NotWritten, State
from dflash.pipeline.drafter_worker import DrafterWorker, Replica
from dflash.pipeline.saver import all_finite, device_buffers, named_state
from dflash.pipeline.supervisor import Failure

RETRY_S = 10.0
_UPDATE = FlatAdamW.step.__code__
"""Inside of it the weights are half old and half new."""


def whole_drafter(
    workers: Sequence[DrafterWorker], left: Sequence[str], failure: Failure | None
) -> DrafterWorker | None:
    """A drafter whose weights are those of a step boundary, the furthest one; None when there is none.

    All replicas hold the same weights. One that failed or hung inside the optimizer's step does not."""
    whole = []
    for worker in workers:
        role = f"drafter/{worker.index}"
        frames: Iterator[CodeType] = iter(())
        if role in left:
            frames = _codes_of_thread(role)
        elif failure is not None and failure.role == role:
            frames = _codes_of_traceback(failure.error.__traceback__)
        if _UPDATE not in frames:
            whole.append(worker)
    return max(whole, key=lambda worker: worker.step_index, default=None)


def _codes_of_thread(name: str) -> Iterator[CodeType]:
    ident = next((one.ident for one in threading.enumerate() if one.name == name), None)
    frame: FrameType | None = sys._current_frames().get(ident or 0)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def _codes_of_traceback(traceback: TracebackType | None) -> Iterator[CodeType]:
    while traceback is not None:
        yield traceback.tb_frame.f_code
        traceback = traceback.tb_next


def states_are_finite(target: Target, device: Device, batches: Sequence[Batch]) -> bool | None:
    """Whether the target's hidden states of some batches hold no NaN; None when it cannot tell any more."""
    try:
        with device.active():
            for batch in batches:
                documents = None if batch.documents is None else batch.documents.to(device.torch)
                for states in target.taps(batch.input_ids.to(device.torch), documents):
                    if not bool(torch.isfinite(states).all()):  # sync: ok, the run is over
                        return False
    except Exception:
        return None
    return True


class LastSave:
    """Writes the last checkpoint; on a full disk it tries the spare folder, or waits for room.

    Args:
        stop: set by the user's next Ctrl-C: give up.
        note: gets a line for each turn that the matter takes.
    """

    def __init__(
        self, folder: Path, spare: Path | None, stop: threading.Event, note: Callable[[str], None]
    ) -> None:
        self._folder, self._spare, self._stop, self._note = folder, spare, stop, note

    def save(
        self, replica: Replica, make_state: Callable[[dict[str, torch.Tensor]], State], keep: int
    ) -> Path | None:
        """The checkpoint's path; None when it was not to be had."""
        try:
            with replica.device.active():
                buffers = {name: tensor.cpu() for name, tensor in device_buffers(replica.optimizer).items()}
        except Exception as error:
            self._note(f"the drafter's state could not be read from {replica.device.name}: {error}")
            return None
        tensors = named_state(replica.flat, buffers)
        if not all_finite(tensors):
            self._note("the drafter's last weights are not finite: no checkpoint of them")
            return None
        state = make_state(tensors)
        try:
            return checkpoint.save(self._folder, state, keep)
        except NotWritten as error:
            self._note(str(error))
        return self._elsewhere(state) or self._wait_for_room(state, keep)

    def _elsewhere(self, state: State) -> Path | None:
        if self._spare is None:
            return None
        try:
            path = checkpoint.publish(checkpoint.write(self._spare, state))
        except NotWritten as error:
            self._note(str(error))
            return None
        self._note(f"the last checkpoint is in {path}; to go on from it, move it to {self._folder}")
        return path

    def _wait_for_room(self, state: State, keep: int) -> Path | None:
        step = state.progress.step
        self._stop.clear()
        self._note(f"waiting for room to save step {step}: free some, or Ctrl-C to give its weights up")
        try:
            while not self._stop.wait(RETRY_S):
                try:
                    return checkpoint.save(self._folder, state, keep)
                except NotWritten:
                    continue
        except KeyboardInterrupt:
            pass
        self._note(f"the weights of step {step} were given up")
        return None
