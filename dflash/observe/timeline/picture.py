"""From the threads' spans to a picture: tracks, counters and the way of each batch. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dflash.observe.timeline.log import DRAW, PREFETCHED, PUT, QUEUE, STEP
from steptime.timeline.picture import Flow, Picture, Span, Track

COUNTERS = (PREFETCHED, QUEUE)
_BESIDE = ("checkpoint writer", "monitor")
_ORDER = ("prefetcher", "target", "drafter", *_BESIDE)
COLOURS = {
    "target.model_forward": "#0072b2",
    "target.pack_hidden": "#56b4e9",
    "target.cpu_copy_enqueue": "#999999",
    "drafter.forward": "#009e73",
    "drafter.backward": "#e69f00",
    "drafter.optimizer_step": "#d55e00",
    "prefetcher.collate": "#8c6d9c",
    "checkpoint": "#cc79a7",
    "tick": "#444444",
}
"""Apart for eyes that confuse red and green, too. Anything else is a wait."""


def picture(logs: Mapping[str, Sequence[Span]], steps: int) -> Picture:
    """The last `steps` steps of drafter 0, and what all others did meanwhile, up to the last thing that a
    worker did. Where drafter 0 made no step, everything.

    Args:
        logs: spans by label, as in `Timeline.log`.
    """
    done = [span for span in logs.get("drafter/0", ()) if span.name == STEP]
    by_workers = [span for label, spans in logs.items() for span in spans if label not in _BESIDE]
    if not by_workers:
        return Picture(0, 0, (), {}, ())
    begin_ns = min(span.begin_ns for span in (done[-steps:] or by_workers))
    end_ns = max(span.end_ns for span in by_workers)
    shown = {
        label: [span for span in spans if span.end_ns >= begin_ns and span.begin_ns <= end_ns]
        for label, spans in logs.items()
    }
    tracks = tuple(Track(label, _in_order(shown[label])) for label in sorted(shown, key=_place))
    divided = tuple(span for span in shown.get("drafter/0", ()) if span.name == STEP)
    return Picture(begin_ns, end_ns, tracks, _counters(shown), _flows(shown), divided)


def _in_order(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Without the events; a span before those that it holds."""
    lasting = [span for span in spans if span.name not in (PUT, DRAW, *COUNTERS)]
    return tuple(sorted(lasting, key=lambda span: (span.begin_ns, -span.end_ns)))


def _counters(logs: Mapping[str, Sequence[Span]]) -> dict[str, tuple[tuple[int, int], ...]]:
    every = [span for spans in logs.values() for span in spans]
    return {
        name: tuple(sorted((span.begin_ns, span.number) for span in every if span.name == name))
        for name in COUNTERS
    }


def _flows(logs: Mapping[str, Sequence[Span]]) -> tuple[Flow, ...]:
    """Batches whose hand-over and draw are both there."""
    every = [(label, span) for label, spans in logs.items() for span in spans]
    puts = {span.number: (label, span.begin_ns) for label, span in every if span.name == PUT}
    return tuple(
        Flow(span.number, *puts[span.number], label, max(span.begin_ns, puts[span.number][1]))
        for label, span in every
        if span.name == DRAW and span.number in puts
    )


def _place(label: str) -> tuple[int, str]:
    kinds = [place for place, kind in enumerate(_ORDER) if label.startswith(kind)]
    return (kinds[0] if kinds else len(_ORDER)), label
