"""The picture as a small SVG, for a browser: a row for each thread and stream, the depths below, a line for
each batch's way. What a rectangle is, its tooltip says. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from xml.sax.saxutils import escape

from dflash.observe.timeline.log import STEP, Span
from dflash.observe.timeline.picture import Flow, Picture, Track

WIDTH, LEFT, RIGHT, TOP = 1200, 132, 16, 56
ROW, BAND, GAP = 26, 16, 16
Scale = Callable[[int], float]
"""From a moment to its place, pixels."""
LEAST = 0.2
"""Spans narrower than this, pixels, are left out."""

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
WAIT = "#d2d2d2"
_FRAMES = (STEP, "target.batch")
"""Spans around others: drawn as a thin line above them."""


def draw(picture: Picture, title: str) -> str:
    """The SVG document."""
    rows = picture.tracks
    depths = TOP + ROW * len(rows) + GAP
    height = depths + (ROW + GAP) * len(picture.counters) + 34
    scale = (WIDTH - LEFT - RIGHT) / max(1, picture.end_ns - picture.begin_ns)

    def x(at_ns: int) -> float:
        return LEFT + (min(max(at_ns, picture.begin_ns), picture.end_ns) - picture.begin_ns) * scale

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14">{escape(title)}</text>',
    ]
    parts += _step_bands(picture, x, depths - GAP)
    middles = {}
    for number, track in enumerate(rows):
        top = TOP + ROW * number
        middles[track.label] = top + ROW / 2
        parts.append(_label(track.label, top + ROW / 2))
        parts += _row(track, top, x)
    parts += [_flow(flow, middles, x) for flow in picture.flows]
    for number, (name, points) in enumerate(picture.counters.items()):
        parts += _counter(name, points, depths + (ROW + GAP) * number, x, picture.end_ns)
    parts += [*_legend(picture, height - 12), "</svg>"]
    return "\n".join(parts) + "\n"


def _step_bands(picture: Picture, x: Scale, bottom: float) -> Iterator[str]:
    """Drafter 0's steps: every other one on grey, with its number where there is room; and a time scale."""
    last = -100.0
    for place, step in enumerate(picture.steps):
        left, right = x(step.begin_ns), x(step.end_ns)
        if place % 2:
            yield _rect(left, TOP - 4, right - left, bottom - TOP + 4, "#f6f6f6")
        if left - last > 34:
            last = left
            yield f'<text x="{left:.1f}" y="48" fill="#555">{step.number}</text>'
    yield f'<text x="{LEFT - 6}" y="48" fill="#555" text-anchor="end">step</text>'
    span_s = (picture.end_ns - picture.begin_ns) / 1e9
    length = _nice(span_s / 5)
    width = (WIDTH - LEFT - RIGHT) * length / span_s if span_s else 0.0
    right = WIDTH - RIGHT
    yield (
        f'<path d="M{right - width:.1f} 14v6h{width:.1f}v-6" fill="none" stroke="#555"/>'
        f'<text x="{right - width - 6:.1f}" y="20" fill="#555" text-anchor="end">{_seconds(length)}</text>'
    )


def _row(track: Track, top: float, x: Scale) -> Iterator[str]:
    for span in track.spans:
        left, right = x(span.begin_ns), x(span.end_ns)
        if right - left < LEAST:
            continue
        tip = f"{track.label}: {_what(span)}, {(span.end_ns - span.begin_ns) / 1e6:.2f} ms"
        if span.name in _FRAMES:
            yield _rect(left, top + 1, right - left, 2, "#777", tip)
        else:
            yield _rect(left, top + (ROW - BAND) / 2, right - left, BAND, COLOURS.get(span.name, WAIT), tip)


def _what(span: Span) -> str:
    return f"{span.name} {span.number}" if span.number >= 0 else span.name


def _rect(left: float, top: float, width: float, height: float, colour: str, tip: str = "") -> str:
    shape = f'<rect x="{left:.2f}" y="{top:.1f}" width="{width:.2f}" height="{height}" fill="{colour}"'
    return f"{shape}><title>{escape(tip)}</title></rect>" if tip else f"{shape}/>"


def _label(text: str, y: float) -> str:
    return f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>'


def _flow(flow: Flow, middles: dict[str, float], x: Scale) -> str:
    source, drain = middles[flow.source], middles[flow.drain]
    return (
        f'<path d="M{x(flow.put_ns):.1f} {source:.1f}L{x(flow.drawn_ns):.1f} {drain:.1f}" stroke="#000" '
        f'stroke-opacity="0.25" fill="none"><title>batch {flow.batch}</title></path>'
    )


def _counter(
    name: str, points: tuple[tuple[int, int], ...], top: float, x: Scale, end_ns: int
) -> Iterator[str]:
    yield _label(name, top + ROW / 2 + 4)
    if not points:
        return
    most = max(1, *(value for _, value in points))
    path, floor = f"M{x(points[0][0]):.1f} {top + ROW:.1f}", top + ROW
    for at_ns, value in points:
        path += f"H{x(at_ns):.1f}V{floor - ROW * value / most:.1f}"
    path += f"H{x(end_ns):.1f}V{floor:.1f}Z"
    yield f'<path d="{path}" fill="#c6d8e8" stroke="#5b87ad" stroke-width="0.7"/>'
    yield f'<text x="{WIDTH - RIGHT}" y="{top - 2:.1f}" fill="#555" text-anchor="end">at most {most}</text>'


def _legend(picture: Picture, y: float) -> Iterator[str]:
    """Of what is there."""
    names = {span.name for track in picture.tracks for span in track.spans} - set(_FRAMES)
    left = float(RIGHT)
    for name in (*(name for name in COLOURS if name in names), *(["wait"] if names - COLOURS.keys() else [])):
        yield _rect(left, y - 9, 10, 10, COLOURS.get(name, WAIT))
        yield f'<text x="{left + 14:.0f}" y="{y}">{escape(name)}</text>'
        left += 26 + 5.8 * len(name)


def _nice(value: float) -> float:
    """1, 2 or 5 times a power of ten, at most `value`; 0 for 0."""
    if value <= 0.0:
        return 0.0
    power = 10.0 ** len(str(int(value))) / 10 if value >= 1 else 1.0
    while power > value:
        power /= 10
    return power * max(step for step in (1, 2, 5) if power * step <= value)


def _seconds(value: float) -> str:
    return f"{value:g} s" if value >= 1 else f"{value * 1e3:g} ms" if value >= 1e-3 else f"{value * 1e6:g} µs"
