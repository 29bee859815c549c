"""A loop of any trainer, measured in pairs of segments."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from steptime.errors import UserError
from steptime.records.pairs import CONTROL, PLACEBO, Layer, Request
from steptime.subjects.control import ControlLoss
from steptime.subjects.injection import Injection
from steptime.subjects.pairs import OnSegment, PairStepper, PathHands, Wanted
from steptime.subjects.protocol import SubjectResult, busy_wait
from steptime.subjects.steps.hold import NOTE, reset_random, weights_held
from steptime.subjects.steps.steps import Periodic, Switch

PILOT = "pilot-wait"
NO_LOSS = "the step returns no loss: whether the training is the same is not checked"


class Loop(Protocol):
    """`Steps`, or what an adapter makes of a framework's loop. Attributes as of `Steps`."""

    cycle: int
    tokens: int | Sequence[int]
    switches: Mapping[str, Switch | Periodic]
    warmup: int
    devices: Sequence[str] | None
    accounted: Callable[[], Mapping[str, float]] | None
    hold: bool
    tick: Callable[[], object] | None
    close: Callable[[], object] | None
    notes: Sequence[str]

    def run(self, batch: Callable[[], int], boundary: Callable[[Any], bool]) -> None:
        """Step until `boundary` says that it is enough. Each step asks `batch` for the index of its batch and
        ends with `boundary(loss)`. It is called twice where something acts every so many steps: its time is
        taken first."""


def devices_of(loop: Loop) -> tuple[str, ...]:
    """Names of the devices that it works on."""
    if loop.devices is not None:
        return tuple(loop.devices)
    return (f"cuda:{torch.cuda.current_device()}",) if torch.cuda.is_available() else ("cpu",)


class Switches:
    """Throws a loop's switches; each only when it changes."""

    def __init__(self, loop: Loop) -> None:
        self._of = dict(loop.switches)
        self._tick = loop.tick or (lambda: None)
        self.on: frozenset[str] = frozenset()
        for name in self._of:
            self._throw(name, False)

    def set(self, on: frozenset[str]) -> None:
        """These are on, the others off."""
        for name in self._of:
            if (name in on) != (name in self.on):
                self._throw(name, name in on)
        self.on = on

    def act(self, on: frozenset[str], flush: bool = True, rarest: int = 0) -> None:
        """Everything that acts every so many steps does so once; without `flush` not the rarest."""
        self._tick()
        for name, switch in self._of.items():
            if name in on and isinstance(switch, Periodic) and (flush or switch.every < rarest):
                switch.act()

    def _throw(self, name: str, on: bool) -> None:
        switch = self._of[name]
        thrown = switch.switch if isinstance(switch, Periodic) else switch
        if thrown is not None:
            thrown(on)


class LoopPairs(PathHands):
    """A loop as a subject that is measured in pairs.

    What acts every so many steps is a tick; where two periods differ, the longer one's is a flush.

    Raises:
        UserError: three different periods, or one that is no multiple of the other.
    """

    def __init__(self, name: str, loop: Loop, injections: Sequence[Injection] = ()) -> None:
        super().__init__()
        self.name = name
        self._loop = loop
        self._injections = {one.name: one for one in injections}
        self.every = _every(loop.switches)
        self.switches: tuple[str, ...] = (*loop.switches, *self._injections, PLACEBO)
        layers = tuple(self.every)
        own = {name: frozenset(_layers(switch, self.every)) for name, switch in loop.switches.items()}
        injected = {one.name: frozenset({one.layer}) for one in injections}
        self.layers: Mapping[str, frozenset[Layer]] = {**own, **injected, PLACEBO: frozenset()}
        for one in injections:
            if one.layer is not Layer.PATH and one.layer not in layers:
                raise UserError(f"--inject @{one.place}: nothing of {name} acts every so many steps")
        self.periods: Mapping[Layer, float] = {}
        self.groups: int = loop.cycle
        self.warmup: int = max(loop.warmup, loop.cycle)
        self.devices: tuple[str, ...] = devices_of(loop)
        self._cuda = [one for one in self.devices if one.startswith("cuda")]
        self.pilot_switch: str | None = PILOT if self._cuda else None
        # A wait of the host hides behind a device that it has run ahead of: not a known cost there.
        self.controlled = not self._cuda and CONTROL not in self.switches
        self.control = ControlLoss()
        self._step = 0
        self._losses: list[tuple[int, Any]] = []
        self._read: list[tuple[int, float]] = []
        self._no_loss = False
        self._began_ns = 0
        self._accounted: dict[str, float] | None = None
        self._thrown: Switches | None = None
        self._stepper: PairStepper | None = None

    def open(self) -> None:
        """Time a step where something acts every so many of them."""
        self._thrown = Switches(self._loop)
        if not self.every and self._loop.accounted is None:
            return
        self._thrown.set(frozenset(self._loop.switches))
        accounted = self._loop.accounted or (dict)
        left, began, before = 2 * self.groups, 0.0, dict[str, float]()

        def boundary(_: Any) -> bool:
            nonlocal left, began, before
            left -= 1
            if left in (self.groups, 0):
                self._synchronize()
            if left == self.groups:
                began, before = time.perf_counter(), dict(accounted())
            return left > 0

        self._step = 0
        with self._held():
            self._loop.run(self._batch, boundary)
        lasted_s = time.perf_counter() - began
        step_s = lasted_s / self.groups
        self.periods = {layer: every * step_s for layer, every in self.every.items()}
        if self._loop.accounted is not None:
            own = {
                name: 100.0 * (seconds - before.get(name, 0.0)) / lasted_s
                for name, seconds in accounted().items()
            }
            self._accounted = {**own, "all": sum(own.values())}
        self._thrown.set(frozenset())

    def close(self) -> None:
        """Let the user's end what they began."""
        if self._loop.close is not None:
            self._loop.close()

    def run_pairs(self, requests: Iterator[Wanted], on_segment: OnSegment) -> SubjectResult:
        """Run the loop until the requests end."""
        # The undisturbed stretch is for monitors with a clock of their own.
        wanted = (one for one in requests if isinstance(one, Request))
        self._step, self.group = 0, None
        self._stepper = PairStepper(
            first_pause=self.warmup - 1,
            requests=wanted,
            on_segment=on_segment,
            hands=self,
            control_s=lambda: self.control.take_s(),
        )
        with self._held():
            self._began_ns = time.perf_counter_ns()
            self._loop.run(self._batch, self._boundary)
        self._read_losses()
        notes = (*self._loop.notes, *([NOTE] if self._loop.hold else []))
        return SubjectResult(
            losses=self._read,
            accounted_percent=self._accounted,
            peak_memory_bytes=max((torch.cuda.max_memory_allocated(one) for one in self._cuda), default=None),
            notes=(*notes, NO_LOSS) if self._no_loss else notes,
        )

    def _held(self) -> contextlib.AbstractContextManager[None]:
        return weights_held() if self._loop.hold else contextlib.nullcontext()

    def _batch(self) -> int:
        group = self._step % self.groups if self.group is None else self.group
        if self._loop.hold:
            reset_random(group)
        return group

    def _boundary(self, loss: Any) -> bool:
        self._losses.append((self._step, loss))
        self._pay()
        assert self._stepper is not None
        self._stepper(self._step)
        self._step += 1
        self._began_ns = time.perf_counter_ns()
        return not self._stepper.finished

    def _pay(self) -> None:
        """Injected costs of the path, and the wait by which the lengths of segments are found."""
        if PILOT in self.on:
            self._synchronize()
        for name, one in self._injections.items():
            if name in self.on and one.layer is Layer.PATH and one.percent:
                share = one.percent / 100.0
                worked_ns = time.perf_counter_ns() - self._began_ns
                busy_wait(int(worked_ns * share / (1.0 - share)))
        if self.controlled and CONTROL in self.on:
            self.control.pay(time.perf_counter_ns() - self._began_ns)

    def _synchronize(self) -> None:
        for device in self._cuda:
            torch.cuda.synchronize(device)

    def _read_losses(self) -> None:
        for step, loss in self._losses:
            parts = loss if isinstance(loss, tuple) else (loss,)
            self._no_loss |= loss is None
            self._read.append((step, 0.0 if loss is None else float(sum(float(part) for part in parts))))
        self._losses.clear()

    # -- the stepper's hands ---------------------------------------------------------------------------------

    def stand(self) -> None:
        """Wait for the devices, and read the losses."""
        self._synchronize()
        self._read_losses()

    def ready(self, request: Request, step: int) -> None:
        """What costs in the path is on in both halves where ticks are measured."""
        self.on = request.on if request.layer is Layer.PATH else frozenset(self.switches)
        assert self._thrown is not None
        self._thrown.set(self.on & frozenset(self._loop.switches))
        self._synchronize()
        self._began_ns = time.perf_counter_ns()

    def force(self, request: Request) -> None:
        """Whatever acts in this layer does so."""
        assert self._thrown is not None
        flush = request.layer is Layer.FLUSH or Layer.FLUSH not in self.every
        self._thrown.act(request.on, flush, self.every.get(Layer.FLUSH, 0))
        for name, one in self._injections.items():
            if name in request.on and one.layer is request.layer:
                period_s = self.periods[one.layer]
                busy_wait(int(1e9 * one.percent / 100.0 * period_s))

    def tokens(self, group: int) -> int:
        """Units of work in a batch."""
        tokens = self._loop.tokens
        return tokens if isinstance(tokens, int) else tokens[group]


def _every(switches: Mapping[str, Switch | Periodic]) -> dict[Layer, int]:
    """Steps between two ticks, and two flushes."""
    found = sorted({one.every for one in switches.values() if isinstance(one, Periodic)})
    if len(found) > 2 or (len(found) == 2 and found[1] % found[0]):
        told = ", ".join(map(str, found))
        raise UserError(f"Periodic(every=...): {told} steps: one period, or two of which one is a multiple")
    return dict(zip((Layer.TICK, Layer.FLUSH), found, strict=False))


def _layers(switch: Switch | Periodic, every: Mapping[Layer, int]) -> set[Layer]:
    if not isinstance(switch, Periodic):
        return {Layer.PATH}
    own = {layer for layer, steps in every.items() if steps == switch.every}
    return own if switch.switch is None else own | {Layer.PATH}
