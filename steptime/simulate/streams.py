"""Streams and events with the rules of CUDA's. What is enqueued on them runs at once; they keep the order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from steptime.simulate.clocks import Clock
from steptime.simulate.races import Actor, Misuse
from steptime.syncs.scopes import EVENT

if TYPE_CHECKING:
    from steptime.simulate.hosts import Host
    from steptime.simulate.simulation import Simulation

STREAM = "stream synchronize"


class Stream:
    """A stream of a simulated device. It orders its own operations and nothing else; the default stream
    does not wait for others either.

    Attributes:
        device: index.
        number: of its own in every clock.
        clock: what comes before the next operation on it.
    """

    def __init__(self, simulation: Simulation, device: int, name: str, number: int, *, default: bool) -> None:
        self.simulation, self.device, self.name, self.number = simulation, device, name, number
        self.default = default
        self.clock = Clock()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make it the calling thread's stream on its device, and that the current device (as
        `torch.cuda.stream`)."""
        host = self.simulation.host()
        device, before = host.device, host.current.get(self.device)
        host.device, host.current[self.device] = self.device, self
        try:
            yield
        finally:
            host.device = device
            if before is None:
                del host.current[self.device]
            else:
                host.current[self.device] = before

    def wait_event(self, event: Event) -> None:
        """Later operations come after what `event` was recorded behind."""
        event._waited_by(self, self.simulation.host())

    def wait_stream(self, other: Stream) -> None:
        """Later operations come after everything that `other` holds now."""
        simulation = self.simulation
        host = simulation.host()
        with simulation.lock:
            simulation.launch(host, other)
            simulation.order(other.clock, other, self)
            self.clock.join(host.clock)

    def keeps(self, tensor: torch.Tensor) -> None:
        """It uses the tensor's memory: freeing that waits for what is on this stream
        (`Tensor.record_stream`)."""
        block = self.simulation.memory.block(tensor)
        if block is not None:
            block.kept_for.add(self.number)

    def query(self) -> bool:
        """Whether everything on it is done: the host then knows."""
        with self.simulation.lock:
            self.simulation.host().clock.join(self.clock)
        return True

    def synchronize(self) -> None:
        """The host waits for everything on it."""
        self.simulation.host_waits(STREAM, self.clock)

    def __repr__(self) -> str:
        return self.name


class Event:
    """An event with CUDA's rules. It belongs to the device of its first record.

    Args:
        timing: it can be given to `elapsed_time`.
    """

    def __init__(self, simulation: Simulation, timing: bool = False) -> None:
        self.simulation, self.timing = simulation, timing
        self.device: int | None = None
        self.clock: Clock | None = None
        self._stream: Stream | None = None
        self._recorded: tuple[int, int, Actor] | None = None
        self._waits: dict[int, tuple[int, Actor]] = {}
        self._polls = 0

    def record(self, stream: Stream | None = None) -> None:
        """Behind everything that the stream holds now; of a stream that is not given, the current one of the
        current device.

        Raises:
            Misuse: the stream is on another device than at the first record.
            Race: another thread's wait has no order with this record, so nobody knows which one it waits for.
        """
        simulation = self.simulation
        host = simulation.host()
        stream = stream or simulation.current_stream(host, host.device)
        host.delay()
        with simulation.lock:
            if self.device is None:
                self.device = stream.device
            elif self.device != stream.device:
                simulation.fail(
                    Misuse(
                        f"Event device {self.device} does not match recording stream's device "
                        f"{stream.device}: "
                        f"{simulation.actor(host, stream.name, 'record')}; make an event for each device"
                    )
                )
            simulation.launch(host, stream)
            actor = simulation.actor(host, stream.name, "record")
            for number, (tick, waiter) in self._waits.items():
                if not host.clock.covers(number, tick):
                    simulation.unordered_event(actor, waiter)
            self._waits.clear()
            tick = host.clock.tick(host.number)
            self._stream, self._recorded = stream, (host.number, tick, actor)
            self.clock = stream.clock.copy()
            late = 0 if host.random is None else host.random.randint(0, 2)
            self._polls = simulation.queries + late
            simulation.counts.records += 1

    def wait(self, stream: Stream | None = None) -> None:
        """Later operations on `stream` (default: the current one) come after the record. Returns at once,
        with no order at all, when nothing was ever recorded."""
        host = self.simulation.host()
        self._waited_by(stream or self.simulation.current_stream(host, host.device), host)

    def _waited_by(self, stream: Stream, host: Host) -> None:
        simulation = self.simulation
        host.delay()
        with simulation.lock:
            simulation.counts.waits += 1
            if self.clock is None or self._stream is None:
                simulation.counts.void_waits += 1
                return
            self._used(host, stream.name, "wait")
            simulation.order(self.clock, self._stream, stream)

    def query(self) -> bool:
        """Whether it has fired; true when nothing was ever recorded. The host then knows what came before."""
        simulation = self.simulation
        host = simulation.host()
        with simulation.lock:
            if self.clock is None:
                return True
            self._used(host, "host", "query")
            if self._polls > 0:
                self._polls -= 1
                return False
            host.clock.join(self.clock)
            return True

    def synchronize(self) -> None:
        """The host waits until it has fired."""
        with self.simulation.lock:
            if self.clock is not None:
                self._used(self.simulation.host(), "host", "synchronize")
        self.simulation.host_waits(EVENT, self.clock or Clock())

    def elapsed_time(self, end: Event) -> float:
        """Virtual milliseconds from this event to `end`.

        Raises:
            Misuse: an event without timing, never recorded, of another device, or not known to be complete.
        """
        simulation = self.simulation
        host = simulation.host()
        for event in (self, end):
            if not event.timing or event.clock is None or event._stream is None:
                simulation.fail(
                    Misuse(
                        "Both events must be recorded before calculating elapsed time, and made with timing: "
                        f"{simulation.actor(host, 'host', 'elapsed_time')}"
                    )
                )
            number = event._stream.number
            if not host.clock.covers(number, event.clock.ticks.get(number, 0)):
                simulation.fail(
                    Misuse(
                        "Both events must be completed before calculating elapsed time.: "
                        f"{simulation.actor(host, 'host', 'elapsed_time')}; ask query() first"
                    )
                )
        assert self.clock is not None
        assert end.clock is not None
        if self.device != end.device:
            simulation.fail(
                Misuse(
                    f"elapsed_time between events of devices {self.device} and {end.device}: "
                    f"{simulation.actor(host, 'host', 'elapsed_time')}"
                )
            )
        return end.clock.time_ms - self.clock.time_ms

    def _used(self, host: Host, lane: str, what: str) -> None:
        """Whoever waits must know on the host that the record was made, or the wait may be void."""
        assert self._recorded is not None
        number, tick, recorder = self._recorded
        actor = self.simulation.actor(host, lane, what)
        if not host.clock.covers(number, tick):
            self.simulation.unordered_event(actor, recorder)
        self._waits[host.number] = (host.clock.tick(host.number), actor)
