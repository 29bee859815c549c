"""Host threads: each has a clock of its own, and only a hand-over orders two of them.

A hand-over is a lock taken after another thread gave it back (so queues, conditions, barriers and
`threading.Event` are seen), the start of a thread, and its join. While a simulation is open
`threading.Lock` and `threading.RLock` make traced ones; those made before, and C's own
(`queue.SimpleQueue`), order nothing."""

from __future__ import annotations

import random
import threading
import time
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from steptime.simulate.clocks import Clock
from steptime.simulate.streams import Stream

if TYPE_CHECKING:
    from steptime.simulate.simulation import Simulation

_LONGEST_DELAY_S = 0.002
_DELAYED = 0.25  # share of the hand-overs


class Host:
    """One thread of the program.

    Attributes:
        number: of its own in every clock.
        current: its current stream on each device; the default stream where it set none.
        device: its current device.
        call: arguments of the torch function under way, which say where a factory inside it puts its memory.
        placing: device of what is made next, None: the host, `UNPLACED`: follow the operands.
        free_value: the value being assigned is a Python number, which needs no copy.
        quiet: above 0 while an operation that was judged as a whole runs.
        last_device: of the last operation.
    """

    __slots__ = (
        "call",
        "clock",
        "current",
        "device",
        "free_value",
        "label",
        "last_device",
        "modes",
        "number",
        "placing",
        "quiet",
        "random",
        "role",
    )

    def __init__(self, role: str, number: int, seed: int | None) -> None:
        self.role, self.number = role, number
        self.clock = Clock()
        self.current: dict[int, Stream] = {}
        self.device = 0
        self.call: tuple[Any, Any] | None = None
        self.placing: Any = UNPLACED
        self.label: str | None = None
        self.free_value = False
        self.quiet = 0
        self.last_device: int | None = None
        self.modes = 0
        self.random = None if seed is None else random.Random(zlib.crc32(f"{seed} {role}".encode()))

    def delay(self) -> None:
        """Before a hand-over: now and then wait a little, as the seed says."""
        if self.random is not None and self.random.random() < _DELAYED:
            time.sleep(self.random.random() * _LONGEST_DELAY_S)


UNPLACED = object()


class TracedLock:
    """A lock that carries what the threads before have done."""

    def __init__(self, simulation: Simulation, lock: Any) -> None:
        self._simulation, self._lock = simulation, lock
        self._clock = Clock()
        # What `threading.Condition` asks of a re-entrant lock.
        if hasattr(lock, "_release_save"):
            self._is_owned = lock._is_owned
            self._release_save = self._saved
            self._acquire_restore = self._restored
        else:
            self.locked = lock.locked

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        host = self._simulation.host_or_none()
        if host is not None and blocking:
            host.delay()
        got: bool = self._lock.acquire(blocking, timeout)
        if got and host is not None:
            host.clock.join(self._clock)
        return got

    def release(self) -> None:
        self._leave()
        self._lock.release()

    def _leave(self) -> None:
        host = self._simulation.host_or_none()
        if host is not None:
            self._clock.join(host.clock)
            host.clock.tick(host.number)
            self._simulation.counts.hand_overs += 1

    def _saved(self) -> Any:
        self._leave()
        return self._lock._release_save()

    def _restored(self, state: Any) -> None:
        self._lock._acquire_restore(state)
        host = self._simulation.host_or_none()
        if host is not None:
            host.clock.join(self._clock)

    def _at_fork_reinit(self) -> None:
        self._lock._at_fork_reinit()

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


class ThreadPatches:
    """What of `threading` is replaced while a simulation is open."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._undo: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        simulation = self._simulation
        lock, reentrant = threading.Lock, threading.RLock
        start, join = threading.Thread.start, threading.Thread.join

        def traced_start(thread: threading.Thread) -> None:
            simulation.begins(thread)
            start(thread)

        def traced_join(thread: threading.Thread, timeout: float | None = None) -> None:
            join(thread, timeout)
            if not thread.is_alive():
                simulation.has_ended(thread)

        recorded = torch.Tensor.record_stream

        def traced_record_stream(tensor: torch.Tensor, stream: Any) -> None:
            if isinstance(stream, Stream):
                stream.keeps(tensor)
            else:
                recorded(tensor, stream)

        self._replace(torch.Tensor, "record_stream", traced_record_stream)
        self._replace(threading, "Lock", lambda: TracedLock(simulation, lock()))
        self._replace(threading, "RLock", lambda: TracedLock(simulation, reentrant()))
        self._replace(threading.Thread, "start", traced_start)
        self._replace(threading.Thread, "join", traced_join)

    def _replace(self, owner: Any, name: str, value: Callable[..., Any]) -> None:
        self._undo.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, value)

    def uninstall(self) -> None:
        while self._undo:
            owner, name, value = self._undo.pop()
            if value is None:
                delattr(owner, name)  # it was inherited
            else:
                setattr(owner, name, value)
