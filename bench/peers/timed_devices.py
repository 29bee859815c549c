"""Devices on a virtual clock whose kernels take the time that they are told."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dflash.device import Device
from steptime.simulate.virtual_threads import VirtualTime

AHEAD = {"target": 2, "drafter": 6}
"""Passes that a host may be ahead of its device: CUDA's launch queue holds some 1,000 launches, two forwards
of 36 layers or the forward, backward and optimizer of two steps."""


@dataclass
class Stream:
    """When all that was enqueued on it is done, seconds."""

    done_s: float = 0.0


class Event:
    """Carries a stream's time from where it is recorded to where it is waited for."""

    def __init__(self, device: TimedDevice) -> None:
        self._device = device
        self._done_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._done_s = (stream or self._device.current).done_s

    def wait(self, stream: Stream | None = None) -> None:
        waits = stream or self._device.current
        waits.done_s = max(waits.done_s, self._done_s)

    def query(self) -> bool:
        return self._done_s <= self._device.time.now_s


class _Here(threading.local):
    stream: Stream | None = None


@dataclass
class Kernel:
    """One that ran: when, and the time that the usual device takes for it."""

    began_s: float
    done_s: float
    usual_s: float


class TimedDevice(Device):
    """A worker's device of a speed. Its memory is the host's, but each shares it with nobody.

    Attributes:
        kernels: all that were launched.
        work_s: of those of each optimizer step, what they take a usual device.
    """

    asynchronous = True
    here = _Here()

    def __init__(self, name: str, time: VirtualTime, speed: float) -> None:
        super().__init__(name)
        self.time, self.speed = time, speed
        self.kernels: list[Kernel] = []
        self.work_s = [0.0]
        self._ahead: deque[float] = deque()

    def __new__(cls, name: str, *_: object) -> TimedDevice:
        return object.__new__(cls)

    @property
    def current(self) -> Stream:
        """The calling thread's stream."""
        return self.here.stream or Stream()

    def new_stream(self) -> Stream:
        return Stream()

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.here.stream = self.here.stream, stream
        try:
            yield
        finally:
            self.here.stream = before

    def event(self, timing: bool = False) -> Event:
        return Event(self)

    def synchronize(self) -> None:
        self.time.sleep(self.current.done_s - self.time.now_s)

    def shares_memory(self, other: Device) -> bool:
        return other is self

    def reaches(self, other: Device) -> bool:
        return True

    def launch(self, usual_ms: float, host_ms: float) -> None:
        """Enqueue a kernel on the current stream, which takes the host some time, and longer when the device
        is far behind."""
        self.time.sleep(host_ms / 1e3)
        stream, usual_s = self.current, usual_ms / 1e3
        began_s = max(stream.done_s, self.time.now_s)
        stream.done_s = began_s + usual_s / self.speed
        self.kernels.append(Kernel(began_s, stream.done_s, usual_s))
        self.work_s[-1] += usual_s
        self._ahead.append(stream.done_s)
        if len(self._ahead) > AHEAD[self.name.partition(":")[0]]:
            self.time.sleep(self._ahead.popleft() - self.time.now_s)
