"""The control in the real trainer: every worker keeps its core busy for a share of a step, at its step
boundary, so that the throughput loses it whichever stage is the slowest.

No collector has it: nothing of it is accounted for, ticked or counted, and while it is off each worker reads
one attribute a step."""

from __future__ import annotations

from collections.abc import Iterable

from dflash.observe.recorder import Instrument, WorkerRecorder
from steptime.records.pairs import CONTROL
from steptime.subjects.control import ControlLoss


class Wait(Instrument):
    """One worker's loss of time.

    Attributes:
        on: the control is on.
        turn_ns: time between two of the worker's boundaries.
    """

    def __init__(self, role: str) -> None:
        self.role = role
        self.turn_ns = 0.0
        self.loss = ControlLoss()

    def run(self) -> None:
        """In the worker's thread."""
        self.loss.pay(self.turn_ns)


class Controls:
    """The waits of all workers. `throw` and `take_s` are called while all workers stand still."""

    def __init__(self) -> None:
        self.waits: list[Wait] = []

    def hang(self, recorders: Iterable[WorkerRecorder]) -> None:
        """Into every target's and drafter's step boundary, before the first step."""
        for recorder in recorders:
            if recorder.role in ("target", "drafter"):
                self.waits.append(Wait(recorder.role))
                recorder.hang(CONTROL, self.waits[-1])

    def set_turns(self, step_s: float, per_step: int) -> None:
        """Say how long a step takes, and how many batches it has."""
        targets = sum(wait.role == "target" for wait in self.waits)
        for wait in self.waits:
            wait.turn_ns = step_s * 1e9 * (targets / per_step if wait.role == "target" else 1.0)

    def throw(self, on: bool) -> None:
        for wait in self.waits:
            wait.on = on

    def take_s(self) -> float:
        """Seconds that the worker lost that lost most, since it was last asked: by the slowest stage goes the
        throughput, and the others wait for it."""
        return max((wait.loss.take_s() for wait in self.waits), default=0.0)
