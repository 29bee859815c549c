"""A subject whose every part takes a stated time on a clock of its own, to see what the step clock counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from steptime.records.pairs import Layer, Request, Segment
from steptime.subjects.pairs import PairStepper, Round, Stretch, Wanted


class Hand:
    """`Hands` by counting; all times in nanoseconds.

    Args:
        lead: lead-in steps of each request.
        prepare: what getting ready takes.
        stand: what waiting for the rest takes.
        step: a step.
        tick: what a tick starts takes; the steps go on beside it.
        stretch: steps of a stretch.
        recorded: steps of a round; 0: nothing can be recorded.
    """

    def __init__(
        self,
        *,
        lead: int = 0,
        prepare: int = 0,
        stand: int = 0,
        step: int = 1,
        tick: int = 0,
        stretch: int = 0,
        recorded: int = 0,
    ) -> None:
        self.lead, self.prepare, self.standing, self.step_ns = lead, prepare, stand, step
        self.tick, self.stretch, self.recorded = tick, stretch, recorded
        self.now_ns = 1
        self.rests_ns = self.left = 0
        self.told: list[str] = []
        self.taken: list[Segment] = []

    def run(
        self,
        wanted: Iterable[Wanted],
        warmup: int = 1,
        control_s: Callable[[], float] = lambda: 0.0,
    ) -> list[Segment]:
        self.stepper = PairStepper(
            first_pause=warmup - 1,
            requests=iter(wanted),
            on_segment=self.taken.append,
            hands=self,
            clock_ns=lambda: self.now_ns,
            control_s=control_s,
        )
        step = 0
        while not self.stepper.finished:
            self.now_ns += self.step_ns
            self.left -= 1
            self.stepper(step)
            step += 1
        return self.taken

    def stand(self) -> None:
        self.told.append("stand")
        self.now_ns = max(self.now_ns + self.standing, self.rests_ns)

    def turn(self, request: Request, step: int) -> int:
        self.told.append("turn")
        return self.lead

    def ready(self, request: Request, step: int) -> None:
        self.told.append("ready")
        self.now_ns += self.prepare

    def force(self, request: Request) -> None:
        assert request.layer is not Layer.PATH
        self.rests_ns = self.now_ns + self.tick

    def resting(self) -> bool:
        return self.now_ns >= self.rests_ns

    def tokens(self, group: int) -> int:
        return 1000 * group

    def begin_stretch(self, stretch: Stretch, step: int) -> None:
        self.told.append("begin")
        self.left = self.stretch

    def stretched(self) -> bool:
        return self.left <= 0

    def end_stretch(self) -> None:
        self.told.append("end")

    def begin_round(self, wanted: Round, step: int) -> int:
        self.told.append(f"record {wanted.name} from {step + 1}")
        return self.recorded

    def end_round(self) -> None:
        self.told.append("recorded")
