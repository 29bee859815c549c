"""How a target's hidden states come to a drafter: read in place, copied between devices, or through pinned
memory.

Which way is a matter of the devices. On one device the drafter reads the target's buffer. Between devices
that reach each other the drafter copies it, on streams of its own. Between those that do not, the target
copies it to pinned memory, also on a stream of its own, and the drafter copies it from there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from dflash.device import Device
from dflash.pipeline.hidden_queue import Buffer, BufferPool, HiddenBatch
from steptime.errors import UserError

if TYPE_CHECKING:
    from dflash.pipeline.target_worker import TargetWorker

PLACES = 2  # one is read by the work under way, the next batch arrives in the other


def through_host(way: Literal["auto", "peer", "pinned"], target: Device, drafters: Iterable[Device]) -> bool:
    """Whether a target's buffers are pinned host memory.

    Raises:
        UserError: `peer` was asked for, and a drafter cannot reach the target.
    """
    far = [drafter for drafter in drafters if not drafter.reaches(target)]
    if way == "peer" and far:
        raise UserError(
            f"queue.hand_over = 'peer': {far[0].name} cannot reach the memory of {target.name}; "
            "use 'auto' or 'pinned'"
        )
    return way == "pinned" or bool(far)


class Room(NamedTuple):
    """Elements and type of the largest batch's hidden states; `last` None: the last ones are not handed
    over."""

    features: int
    last: int | None
    dtype: torch.dtype

    def buffer(self, device: Device, pool: BufferPool | None = None, *, pinned: bool = False) -> Buffer:
        """A buffer for such a batch, on the device or in pinned memory."""

        def memory(size: int) -> torch.Tensor:
            if pinned:
                return device.pinned((size,), self.dtype)
            return torch.empty(size, dtype=self.dtype, device=device.torch)

        last = None if self.last is None else memory(self.last)
        return Buffer(pool, memory(self.features), last, device.event())


Parts = tuple[torch.Tensor, torch.Tensor | None]
"""Features `[batch, length, taps*hidden]`, and last hidden states `[batch, length, hidden]` for
distillation."""


class Staging:
    """Where a target packs what goes to pinned memory, and its way there. Owned by the target's thread."""

    def __init__(self, device: Device, room: Room) -> None:
        self._device = device
        self._stream = device.new_stream()
        self._places = [(room.buffer(device), device.event()) for _ in range(PLACES)]
        self._next = 0

    def place(self) -> Buffer:
        """The next place to pack into; the current stream waits until it has been sent."""
        place, _ = self._places[self._next]
        if place.freed is not None:
            place.freed.wait()
        return place

    def send(self, features: torch.Tensor, last: torch.Tensor | None, to: Buffer) -> Parts:
        """Enqueue the copies of what was packed in `place()`. Returns them in pinned memory, ready behind
        `to.ready`."""
        place, sent = self._places[self._next]
        self._next = (self._next + 1) % PLACES
        place.ready.record()
        with self._device.on(self._stream):
            place.ready.wait()
            if to.freed is not None:
                to.freed.wait()
            landed = copied(features, to.memory)
            landed_last = None if last is None or to.last is None else copied(last, to.last)
            to.ready.record()
            sent.record()
        place.freed = sent
        return landed, landed_last


class Receiver:
    """A drafter's end. Owned by its thread.

    Args:
        device: the drafter's.
        targets: all target workers.
    """

    def __init__(self, device: Device, targets: Sequence[TargetWorker]) -> None:
        self._device = device
        self._in_place = {
            target.index
            for target in targets
            if not target.through_host and device.shares_memory(target.device)
        }
        self._free = {buffer: device.event() for target in targets for buffer in target.buffers}
        self._landings: list[Buffer] = []
        self._landed: Buffer | None = None
        self._next = 0
        if len(self._in_place) < len(targets):
            self._stream = device.new_stream()
            self._landings = [targets[0].room.buffer(device) for _ in range(PLACES)]
            self._free |= {landing: device.event() for landing in self._landings}

    def receive(self, item: HiddenBatch, *, give_back: bool = True) -> Parts:
        """The hidden states on this device, ready for what is enqueued next on the current stream.

        Args:
            give_back: the target may use the buffer again once it has been copied.
        """
        if item.target in self._in_place:
            item.buffer.ready.wait()
            return item.features, item.last_hidden
        landing = self._landings[self._next]
        self._next = (self._next + 1) % PLACES
        with self._device.on(self._stream):
            item.buffer.ready.wait()
            if landing.freed is not None:
                landing.freed.wait()
            features = copied(item.features, landing.memory)
            last = None
            if item.last_hidden is not None and landing.last is not None:
                last = copied(item.last_hidden, landing.last)
            landing.ready.record()
            if give_back:
                self._give_back(item.buffer)
        landing.ready.wait()
        self._landed = landing
        return features, last

    def done(self, item: HiddenBatch, *, give_back: bool = True) -> None:
        """The last read of what `receive` gave is enqueued on the current stream."""
        if self._landed is None:
            if give_back:
                self._give_back(item.buffer)
        else:
            self._free_after_reads(self._landed)
            self._landed = None

    def _give_back(self, buffer: Buffer) -> None:
        self._free_after_reads(buffer)
        buffer.release()

    def _free_after_reads(self, buffer: Buffer) -> None:
        free = self._free[buffer]
        free.record()
        buffer.freed = free


def copied(source: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """`source` copied to the front of `memory`, in its shape; never waits."""
    landed = memory[: source.numel()].view(source.shape)
    return landed.copy_(source, non_blocking=True)
