"""What a picture of some steps shows: tracks of spans, counters, and the way of each batch. It goes into a
receipt as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple


class Span(NamedTuple):
    """A stretch of time of one thread or stream, `perf_counter_ns`. `number`: of the batch or the step, or a
    depth; -1 for none. An event has no length."""

    name: str
    begin_ns: int
    end_ns: int
    number: int = -1


class Track(NamedTuple):
    """Spans of one thread or stream, ascending; a span lies inside another one or beside it."""

    label: str
    spans: tuple[Span, ...]


class Flow(NamedTuple):
    """A batch's way from the end of one thread's work to the thread that draws it."""

    batch: int
    source: str
    put_ns: int
    drain: str
    drawn_ns: int


_STRICT: Final = {"extra": "forbid"}


@dataclass(frozen=True, slots=True)
class Picture:
    """What is shown between two moments, `perf_counter_ns`.

    Attributes:
        counters: by name, (moment, value), ascending.
        steps: by which the picture is divided.
    """

    __pydantic_config__ = _STRICT

    begin_ns: int
    end_ns: int
    tracks: tuple[Track, ...]
    counters: dict[str, tuple[tuple[int, int], ...]]
    flows: tuple[Flow, ...]
    steps: tuple[Span, ...] = ()

    def from_zero(self) -> Picture:
        """The same with moments that count from its begin; a span around the begin is cut there."""

        def at(moment_ns: int) -> int:
            return max(0, moment_ns - self.begin_ns)

        def moved(span: Span) -> Span:
            return span._replace(begin_ns=at(span.begin_ns), end_ns=at(span.end_ns))

        return Picture(
            0,
            at(self.end_ns),
            tuple(Track(track.label, tuple(map(moved, track.spans))) for track in self.tracks),
            {
                name: tuple((at(moment_ns), value) for moment_ns, value in points)
                for name, points in self.counters.items()
            },
            tuple(flow._replace(put_ns=at(flow.put_ns), drawn_ns=at(flow.drawn_ns)) for flow in self.flows),
            tuple(map(moved, self.steps)),
        )


@dataclass(frozen=True, slots=True)
class Rounds:
    """The same batches in several pictures, each with other things switched on.

    Attributes:
        pictures: by what was on, each from zero.
        colours: of spans, by name; any other is a wait.
    """

    __pydantic_config__ = _STRICT

    pictures: dict[str, Picture] = field(default_factory=dict)
    colours: Mapping[str, str] = field(default_factory=dict)
