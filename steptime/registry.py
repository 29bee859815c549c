"""Things of one kind by name: each is one file and one line in its registry, and nothing else knows it by
name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from steptime.errors import UserError, nearest

ALL = "all"
"""In a list of names it stands for every thing that is registered."""


class Named(Protocol):
    """A class or an object with a name of its own."""

    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Named)


class Registry(Generic[T]):
    """The things of one kind, in the order of their registration.

    Args:
        kind: what one of them is called in a message, e.g. `collector`.

    Attributes:
        entries: the things by name. A test adds one of its own here.
    """

    def __init__(self, kind: str, *things: T) -> None:
        self.kind = kind
        self.entries: dict[str, T] = {thing.name: thing for thing in things}
        if len(self.entries) < len(things):
            raise ValueError(f"two {kind}s of one name: {', '.join(thing.name for thing in things)}")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.entries)

    def __iter__(self) -> Iterator[T]:
        return iter(self.entries.values())

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, name: str) -> T:
        """The thing of that name.

        Raises:
            UserError: there is none; the message gives the nearest name.
        """
        if name not in self.entries:
            raise unknown(self.kind, name, self.names)
        return self.entries[name]

    def chosen(self, names: Iterable[str]) -> tuple[T, ...]:
        """The things that a setting names, in its order; `all` stands for every one.

        Raises:
            UserError: a name that is not registered.
        """
        return tuple(thing for name in names for thing in (self if name == ALL else (self[name],)))


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The complaint about a name that nothing of this kind has."""
    known = tuple(known)
    return UserError(f"unknown {kind} {name!r}{nearest(name, known)} (known: {', '.join(known)})")
