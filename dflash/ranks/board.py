"""What ranks tell each other beside the gradients: small messages on the store that torch.distributed keeps.

No collective, so nobody has to be there at the same time. Only threads that may wait use it, never a worker's
step."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

_POLL_S = 0.02


class Store(Protocol):
    """The part of `torch.distributed.Store` that is used here."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def compare_set(self, key: str, expected: str, value: str) -> bytes: ...

    def delete_key(self, key: str) -> bool: ...


class StoreGone(RuntimeError):
    """The store cannot be reached."""


class Board:
    """Values by key that every rank sees, as JSON. From any thread.

    Every method raises StoreGone when the store's process or its machine is gone."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def post(self, key: str, value: Any) -> None:
        """Set a value."""
        self._ask(lambda: self._store.set(key, json.dumps(value)))

    def post_first(self, key: str, value: Any) -> Any:
        """Set a value unless somebody has; returns the one that stands."""
        return json.loads(self._ask(lambda: self._store.compare_set(key, "", json.dumps(value))))

    def look(self, key: str) -> Any:
        """The value, or None while there is none. Waits for nobody."""
        if not self._ask(lambda: self._store.check([key])):
            return None
        return json.loads(self._ask(lambda: self._store.get(key)))

    def take(self, key: str) -> Any:
        """Likewise, and the value is gone; for its only reader."""
        value = self.look(key)
        if value is not None:
            self._ask(lambda: self._store.delete_key(key))
        return value

    def wait(self, key: str, timeout_s: float, over: Callable[[], bool] = lambda: False) -> Any:
        """The value as soon as it is there; None after `timeout_s` seconds, or when `over()`."""
        deadline = time.monotonic() + timeout_s
        while (value := self.look(key)) is None:
            if over() or time.monotonic() > deadline:
                return None
            time.sleep(_POLL_S)
        return value

    def _ask(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            raise StoreGone(f"the store that rank 0's machine keeps cannot be reached: {first}") from None


class Post:
    """Messages of one rank to rank 0, in order. From any thread of that rank."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._rank, self._next = board, rank, 0
        self._lock = threading.Lock()

    def send(self, kind: str, value: Any) -> None:
        with self._lock:
            self._board.post(f"mail/{self._rank}/{self._next}", [kind, value])
            self._next += 1


class Mailbox:
    """Rank 0's side of `Post`: the messages of one rank, each once, in order."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._rank, self._next = board, rank, 0

    def take(self) -> tuple[str, Any] | None:
        """The next one, or None."""
        message = self._board.take(f"mail/{self._rank}/{self._next}")
        if message is None:
            return None
        self._next += 1
        kind, value = message
        return kind, value
