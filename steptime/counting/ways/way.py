"""What every way of counting has in common."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from steptime.counting.difference import Counts
from steptime.syncs.counting import summed
from steptime.syncs.dispatch import WatchingMode
from steptime.syncs.scopes import Key, Ledger, Scope, calling_place, current_scope, entered


class Way(Protocol):
    """One way of counting host syncs and device work.

    Attributes:
        name: one or two words.
        sees, does_not_see: one sentence each, for docs/syncs.md.
        claims: faults of `bench.syncs.faults.planted` that it finds; anything else it may miss.
        every_step: what comes in each step is counted in each; False: it may show once (source, caches).
        device: where a program must run to be seen: "cpu", "cuda", "meta", or "source" when nothing runs.
    """

    name: str
    sees: str
    does_not_see: str
    claims: frozenset[str]
    every_step: bool
    device: str

    def available(self) -> str | None:
        """None, or why it cannot be armed on this machine. A run that required it is then invalid."""
        ...

    def arm(self, role: str) -> AbstractContextManager[object]:
        """Count what the calling thread does inside, and autograd on its behalf, charged to `role`.

        Raises:
            Unavailable: it cannot be armed.
        """
        ...

    def counts(self) -> Counts:
        """(role, kind, place) -> number, so far."""
        ...


class Unavailable(RuntimeError):
    """A way of counting could not be armed: whatever it would have counted is unknown, not zero."""


class Notes:
    """Counts of a way that is told of events by callbacks. Who and why come from the thread's scope."""

    def __init__(self) -> None:
        self.counts: dict[Key, int] = {}
        self.declared: dict[tuple[Key, str], int] = {}

    def note(self, kind: str, amount: int = 1) -> None:
        """One event in the calling thread; nothing outside a scope, or while its ledger is not armed."""
        scope = current_scope()
        if scope is None or not scope.ledger.armed:
            return
        key = Key(scope.role, scope.step, kind, calling_place())
        if scope.reason is not None:
            self.declared[key, scope.reason] = self.declared.get((key, scope.reason), 0) + amount
        else:
            self.counts[key] = self.counts.get(key, 0) + amount

    def summed(self) -> Counts:
        """Over all steps."""
        return summed(self.counts.copy())


class Carrier(WatchingMode):
    """Does nothing but carry the scope into autograd's threads, which inherit dispatch modes."""

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self.sync_scope = scope

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def carried(role: str) -> Iterator[Scope]:
    """A scope for `role` in the calling thread, its ledger armed."""
    scope = Scope(role, True, Ledger(armed=True))
    with entered(scope), Carrier(scope):
        yield scope


def required(way: Way) -> None:
    """Refuse a way that is not available.

    Raises:
        Unavailable: with the reason.
    """
    reason = way.available()
    if reason is not None:
        raise Unavailable(f"{way.name}: unavailable: {reason}")
