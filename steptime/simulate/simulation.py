"""One simulation of a machine's devices in this process: streams, clocks, memory, what was found."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from steptime.simulate.clocks import Clock
from steptime.simulate.hosts import Host, ThreadPatches
from steptime.simulate.memory import Block, Memory
from steptime.simulate.races import Access, Actor, Race, byte_range
from steptime.simulate.streams import Event, Stream
from steptime.syncs.scopes import DEVICE, Place, calling_place, current_scope, note_wait

Cost = Callable[[str, Stream], float]
"""Virtual milliseconds that an operation of this name takes on a stream."""


@dataclass
class Counts:
    """What the check has looked at.

    Attributes:
        copies: between two devices, and between a device and the host, by kind: number and bytes.
        copied_at: the same by (role, kind, place).
        default_stream: operations on a device's default stream, by (role, place): every thread shares it.
        waits_of_hosts: a thread waited for a device outside `allowed_sync`, by (role, kind, place).
        ordered: pairs of streams that a wait has ordered, (before, after).
    """

    operations: int = 0
    accesses: int = 0
    records: int = 0
    waits: int = 0
    void_waits: int = 0
    hand_overs: int = 0
    frees: int = 0
    streams: int = 0
    copies: dict[str, list[int]] = field(default_factory=dict)
    copied_at: dict[tuple[str, str, Place], list[int]] = field(default_factory=dict)
    default_stream: dict[tuple[str, Place], int] = field(default_factory=dict)
    waits_of_hosts: dict[tuple[str, str, Place], int] = field(default_factory=dict)
    ordered: set[tuple[str, str]] = field(default_factory=set)


class _Here(threading.local):
    host: Host | None = None
    simulation: Any = None


class Simulation:
    """Simulated devices for the threads that run while it is open.

    Args:
        seed: of small delays at hand-overs, records and waits, and of how late events fire; None: no delays.
        queries: of an event that are told it has not fired yet; with a seed up to two more. A host that
            learns late what is done must rely on what orders streams.
        cost: virtual time of each operation; None: 0.

    Attributes:
        faults: everything found, the first one first. It was also raised.
    """

    def __init__(self, *, seed: int | None = None, queries: int = 0, cost: Cost | None = None) -> None:
        self.seed, self.queries, self.cost = seed, queries, cost
        self.lock = threading.RLock()
        self.counts = Counts()
        self.memory = Memory(self)
        self.faults: list[Exception] = []
        self.is_open = False
        self._here = _Here()
        self._numbers = 0
        self._defaults: dict[int, Stream] = {}
        self._streams: list[Stream] = []
        self._begun: weakref.WeakKeyDictionary[threading.Thread, Clock] = weakref.WeakKeyDictionary()
        self._hosts: weakref.WeakKeyDictionary[threading.Thread, Host] = weakref.WeakKeyDictionary()
        self._patches = ThreadPatches(self)

    # -- opening and closing ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def open(self) -> Iterator[Simulation]:
        """Trace the locks and threads made from now on, and put the calling thread under the rules.

        Raises:
            RuntimeError: another one is open in this process.
        """
        global _open
        from steptime.simulate.modes import entered

        with _open_lock:
            if _open is not None:
                raise RuntimeError("a simulation is open in this process already")
            _open = self
        self.is_open = True
        self._patches.install()
        try:
            with entered(self):
                yield self
        finally:
            self._patches.uninstall()
            self.is_open = False
            _open = None

    # -- threads ---------------------------------------------------------------------------------------------

    def host(self) -> Host:
        """The calling thread."""
        here = self._here
        if here.host is None:
            thread = threading.current_thread()
            with self.lock:
                here.host = self._hosts[thread] = Host(thread.name, self._number(), self.seed)
                begun = self._begun.get(thread)
            if begun is not None:
                here.host.clock.join(begun)
        return here.host

    def host_or_none(self) -> Host | None:
        """The calling thread while the simulation is open; None in a thread that Python does not know
        (yet)."""
        if not self.is_open or threading.get_ident() not in threading._active:  # type: ignore[attr-defined]
            return None
        return self.host()

    def begins(self, thread: threading.Thread) -> None:
        """The calling thread starts `thread`, which knows what the caller knows."""
        host = self.host_or_none()
        if host is not None:
            self._begun[thread] = host.clock.copy()
            host.clock.tick(host.number)

    def has_ended(self, thread: threading.Thread) -> None:
        """The calling thread has joined `thread`, and knows what that did."""
        host, other = self.host_or_none(), self._hosts.get(thread)
        if host is not None and other is not None:
            host.clock.join(other.clock)

    # -- devices ---------------------------------------------------------------------------------------------

    def stream(self, device: int, name: str = "") -> Stream:
        """A new stream of a device."""
        with self.lock:
            self.counts.streams += 1
            number = self._number()
            made = Stream(self, device, name or f"sim:{device}/stream{number}", number, default=False)
            self._streams.append(made)
            return made

    def event(self, timing: bool = False) -> Event:
        """A new event, of no device yet."""
        return Event(self, timing)

    def default_stream(self, device: int) -> Stream:
        """The device's default stream."""
        found = self._defaults.get(device)
        if found is None:
            with self.lock:
                found = Stream(self, device, f"sim:{device}/default", self._number(), default=True)
                found = self._defaults.setdefault(device, found)
                self._streams.append(found)
        return found

    def current_stream(self, host: Host, device: int) -> Stream:
        """The thread's current stream of that device."""
        return host.current.get(device) or self.default_stream(device)

    def synchronize(self, device: int) -> None:
        """The host waits for all streams of a device."""
        known = Clock()
        with self.lock:
            for stream in self._streams:
                if stream.device == device:
                    known.join(stream.clock)
        self.host_waits(DEVICE, known)

    def host_waits(self, kind: str, clock: Clock) -> None:
        """The calling thread waits until what `clock` holds is done."""
        host = self.host()
        with self.lock:
            host.clock.join(clock)
            scope = current_scope()
            if scope is None or scope.reason is None:
                key = (host.role, kind, calling_place(2))
                self.counts.waits_of_hosts[key] = self.counts.waits_of_hosts.get(key, 0) + 1
        note_wait(kind)

    # -- what is done ----------------------------------------------------------------------------------------

    def launch(self, host: Host, stream: Stream, name: str = "") -> int:
        """Enqueue something on a stream. Returns its tick there. Under the lock."""
        stream.clock.join(host.clock)
        if self.cost is not None and name:
            stream.clock.time_ms += self.cost(name, stream)
        return stream.clock.tick(stream.number)

    def order(self, clock: Clock, before: Stream, after: Stream) -> None:
        """`after` comes behind `clock`, which was taken on `before`. Under the lock."""
        after.clock.join(clock)
        if before is not after:
            self.counts.ordered.add((before.name, after.name))

    def touch(
        self, block: Block, tensor: torch.Tensor, clock: Clock, number: int, actor: Actor, *, write: bool
    ) -> None:
        """An access by what has just been launched under `clock`. Under the lock."""
        self.counts.accesses += 1
        if tensor.numel() == 0:
            return
        low, high = byte_range(tensor)
        access = Access(low, high, number, clock.ticks[number], actor)
        earlier = block.history.add(access, clock, write=write)
        if earlier is not None:
            kinds = ("write" if write else "read", "write" if earlier in block.history.writes else "read")
            self._race(block, earlier, f"{kinds[0]}: {actor}", low, high)

    def _race(self, block: Block, earlier: Access, second: str, low: int, high: int) -> NoReturn:
        where = "host memory" if block.device is None else f"sim:{block.device}"
        low, high = max(low, earlier.low), min(high, earlier.high)
        self.fail(
            Race(
                f"nothing orders these two on bytes {low} to {high} of {block.size} in {where}: "
                f"first, {earlier.actor}; then, {second}"
            )
        )

    def settle(self) -> None:
        """Look at what was freed since the last operation: what is freed after the last one does no harm.
        Under the lock, or when all threads have ended."""
        freed = self.memory.freed
        while freed:
            block, clock, role = freed.popleft()
            self.counts.frees += 1
            assert block.stream is not None
            history = block.history
            for access in (*history.writes, *history.reads):
                if access.number in block.kept_for or clock.covers(access.number, access.tick):
                    continue
                self._race(
                    block,
                    access,
                    f"freed by {role}: the next allocation on {block.stream.name} may get it; wait for the "
                    "other stream first, or call record_stream",
                    0,
                    block.size,
                )

    def actor(self, host: Host, lane: str, what: str) -> Actor:
        return Actor(host.role, lane, what, calling_place(2))

    def unordered_event(self, one: Actor, other: Actor) -> NoReturn:
        """A wait and a record of one event without an order on the host."""
        self.fail(
            Race(f"no hand-over orders these two uses of one event, so the wait may be void: {one}; {other}")
        )

    def fail(self, fault: Exception) -> NoReturn:
        """Keep it and raise it."""
        self.faults.append(fault)
        raise fault

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers


_open: Simulation | None = None
_open_lock = threading.Lock()


def current() -> Simulation | None:
    """The simulation that is open in this process."""
    return _open
