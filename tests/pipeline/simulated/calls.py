"""Which records, waits, queries and releases the pipeline makes, and a run without one of them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dflash.pipeline.hidden_queue import Buffer
from steptime.simulate import Event

PIPELINE = str(Path(__file__).parents[3] / "dflash" / "pipeline")


class Call(NamedTuple):
    """A place in the pipeline that calls an event, or gives a buffer back.

    Attributes:
        path: the innermost two frames of the pipeline, "file:line", the caller first: a helper that serves
            two callers counts twice.
    """

    kind: str
    path: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind} {' > '.join(self.path)}"


@contextlib.contextmanager
def watching(without: Call | None = None) -> Iterator[dict[Call, int]]:
    """Count the calls of the pipeline's workers by place; `without` is left out, as if it stood not there."""
    seen: dict[Call, int] = {}
    points = [
        (Event, "record", None),
        (Event, "wait", None),
        (Event, "query", True),
        (Buffer, "release", None),
    ]
    originals = [getattr(owner, name) for owner, name, _ in points]

    def wrapped(name, original, answer):
        def call(self, *arguments):
            at = _call(name)
            if at is None:
                return original(self, *arguments)
            seen[at] = seen.get(at, 0) + 1
            return answer if at == without else original(self, *arguments)

        return call

    for (owner, name, answer), original in zip(points, originals, strict=True):
        setattr(owner, name, wrapped(name, original, answer))
    try:
        yield seen
    finally:
        for (owner, name, _), original in zip(points, originals, strict=True):
            setattr(owner, name, original)


def _call(kind: str) -> Call | None:
    """The place of the call; None outside the pipeline, and in the warm-up, where the host waits anyway."""
    frames: list[str] = []
    frame = sys._getframe(2)
    if not frame.f_code.co_filename.startswith(PIPELINE):
        return None  # what only measures
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PIPELINE):
            if code.co_name == "warm_up":
                return None
            frames.append(f"{Path(code.co_filename).name}:{frame.f_lineno}")
        frame = frame.f_back
    return Call(kind, tuple(reversed(frames[:2]))) if frames else None
