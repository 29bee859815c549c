"""The picture in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: `X` a span, `M` a name, `C` a
counter, `s` and `f` a flow's ends, each bound to the span around it. Times are microseconds."""

from __future__ import annotations

from typing import Any

from steptime.timeline.picture import Flow, Picture, Span

_PROCESS = 1


def trace(picture: Picture, name: str) -> dict[str, Any]:
    """A JSON object. Every event's time counts from the picture's begin."""
    threads = {track.label: number for number, track in enumerate(picture.tracks, start=1)}
    begin_ns = picture.begin_ns
    events: list[dict[str, Any]] = [_named("process_name", 0, {"name": f"dflash train: {name}"})]
    for label, thread in threads.items():
        events.append(_named("thread_name", thread, {"name": label}))
        events.append(_named("thread_sort_index", thread, {"sort_index": thread}))
    for track in picture.tracks:
        events += [_span(span, threads[track.label], begin_ns) for span in track.spans]
    for counter, points in picture.counters.items():
        events += [
            _event("C", counter, 0, at_ns, begin_ns) | {"args": {"batches": value}} for at_ns, value in points
        ]
    for flow in picture.flows:
        events += _ends(flow, threads, begin_ns)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"steps": len(picture.steps)}}


def _event(kind: str, name: str, thread: int, at_ns: int, begin_ns: int) -> dict[str, Any]:
    # A span that began before the first step is cut there: the format knows no time below 0.
    moment = max(0, at_ns - begin_ns) / 1e3
    return {"ph": kind, "name": name, "pid": _PROCESS, "tid": thread, "ts": moment}


def _named(what: str, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": thread, "args": args}


def _span(span: Span, thread: int, begin_ns: int) -> dict[str, Any]:
    event = _event("X", span.name, thread, span.begin_ns, begin_ns)
    event["dur"] = (span.end_ns - max(span.begin_ns, begin_ns)) / 1e3
    event["cat"] = span.name.partition(".")[0]
    if span.number >= 0:
        event["args"] = {"number": span.number}
    return event


def _ends(flow: Flow, threads: dict[str, int], begin_ns: int) -> list[dict[str, Any]]:
    shared = {"cat": "batch", "id": flow.batch}
    return [
        _event("s", "batch", threads[flow.source], flow.put_ns, begin_ns) | shared,
        _event("f", "batch", threads[flow.drain], flow.drawn_ns, begin_ns) | shared | {"bp": "e"},
    ]
