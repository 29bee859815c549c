"""The race check: two accesses to the same bytes, one of them a write, must have an order.

Memory is known by storage and byte range, so views at other offsets are seen as what they are, and shards
of one buffer do not meet. A strided view counts as the whole range from its first to its last byte."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from steptime.simulate.clocks import Clock
from steptime.syncs.scopes import Place


class Misuse(RuntimeError):
    """What CUDA would refuse: an event on two devices, operands of two devices, a time that is not there."""


class Race(RuntimeError):
    """Two accesses without an order, or a wait that may come before its record."""


@dataclass(frozen=True, slots=True)
class Actor:
    """Who did something, and where: for messages.

    Attributes:
        role: the thread's name, "drafter/1".
        lane: the stream's name, or "host".
        what: the operation.
        place: file, line and function of the program.
    """

    role: str
    lane: str
    what: str
    place: Place

    def __str__(self) -> str:
        return f"{self.what} by {self.role} on {self.lane} at {self.place}"


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes low..high of a storage, by one action (`number`, `tick`) of a stream or a host thread."""

    low: int
    high: int
    number: int
    tick: int
    actor: Actor


class History:
    """The last accesses to one storage. Earlier ones come before these, so nobody needs them."""

    __slots__ = ("reads", "writes")

    def __init__(self) -> None:
        self.reads: list[Access] = []
        self.writes: list[Access] = []

    def add(self, access: Access, clock: Clock, *, write: bool) -> Access | None:
        """Note an access done under `clock`. Returns an earlier access that has no order with it, or None."""
        found = self.unordered(access.low, access.high, clock, write=write)
        if write:
            self.writes = _outside(self.writes, access)
            self.reads = _outside(self.reads, access)
            self.writes.append(access)
        else:
            number = access.number
            self.reads = [
                read
                for read in self.reads
                if read.number != number or read.low < access.low or read.high > access.high
            ]
            self.reads.append(access)
        return found

    def unordered(self, low: int, high: int, clock: Clock, *, write: bool) -> Access | None:
        """An access to these bytes that `clock` does not cover."""
        for earlier in (*self.writes, *self.reads) if write else self.writes:
            if earlier.low < high and low < earlier.high and not clock.covers(earlier.number, earlier.tick):
                return earlier
        return None


def _outside(accesses: list[Access], access: Access) -> list[Access]:
    return [one for one in accesses if one.low < access.low or one.high > access.high]


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of a strided tensor in its storage, and one past its last."""
    size = tensor.element_size()
    low = int(tensor.storage_offset())
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return low * size, (low + int(last) + 1) * size
