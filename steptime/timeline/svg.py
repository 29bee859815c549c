"""A picture as a small SVG, for a browser: a row for each thread and stream, the depths below, a line for
each batch's way. What a rectangle is, its tooltip says. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from xml.sax.saxutils import escape

from steptime.timeline.picture import Flow, Picture, Span, Track

WIDTH, LEFT, RIGHT, TOP = 1200, 132, 16, 56
ROW, BAND, GAP = 26, 16, 16
Scale = Callable[[int], float]
"""From a moment to its place, pixels."""
LEAST = 0.2
"""Spans narrower than this, pixels, are left out."""


@dataclass(frozen=True, slots=True)
class Look:
    """Colours of what is no span; `paper` empty: whatever is behind."""

    paper: str = "white"
    ink: str = "#000"
    soft: str = "#555"
    band: str = "#f6f6f6"
    wait: str = "#d2d2d2"
    depth: str = "#c6d8e8"
    edge: str = "#5b87ad"


def draw(
    picture: Picture,
    title: str,
    colours: Mapping[str, str],
    look: Look | None = None,
    *,
    length_ns: int = 0,
) -> str:
    """The SVG document.

    Args:
        colours: of spans, by name; any other is a wait.
        length_ns: time that the whole width stands for, if it is longer than the picture.
    """
    look = look or Look()
    rows = picture.tracks
    depths = TOP + ROW * len(rows) + GAP
    height = depths + (ROW + GAP) * len(picture.counters) + 34
    scale = (WIDTH - LEFT - RIGHT) / max(1, length_ns, picture.end_ns - picture.begin_ns)

    def x(at_ns: int) -> float:
        return LEFT + (min(max(at_ns, picture.begin_ns), picture.end_ns) - picture.begin_ns) * scale

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="11" fill="{look.ink}">',
        *([f'<rect width="{WIDTH}" height="{height}" fill="{look.paper}"/>'] if look.paper else []),
        f'<text x="{LEFT}" y="18" font-size="14">{escape(title)}</text>',
    ]
    parts += _step_bands(picture, x, depths - GAP, scale, look)
    middles = {}
    for number, track in enumerate(rows):
        top = TOP + ROW * number
        middles[track.label] = top + ROW / 2
        parts.append(_label(track.label, top + ROW / 2))
        parts += _row(track, top, x, colours, look)
    parts += [_flow(flow, middles, x, look) for flow in picture.flows]
    for number, (name, points) in enumerate(picture.counters.items()):
        parts += _counter(name, points, depths + (ROW + GAP) * number, x, picture.end_ns, look)
    parts += [*_legend(picture, height - 12, colours, look), "</svg>"]
    return "\n".join(parts) + "\n"


def _step_bands(picture: Picture, x: Scale, bottom: float, scale: float, look: Look) -> Iterator[str]:
    """The steps: every other one on grey, with its number where there is room; and a time scale."""
    last = -100.0
    for place, step in enumerate(picture.steps):
        left, right = x(step.begin_ns), x(step.end_ns)
        if place % 2:
            yield _rect(left, TOP - 4, right - left, bottom - TOP + 4, look.band)
        if left - last > 34:
            last = left
            yield f'<text x="{left:.1f}" y="48" fill="{look.soft}">{step.number}</text>'
    yield f'<text x="{LEFT - 6}" y="48" fill="{look.soft}" text-anchor="end">step</text>'
    length = _nice((picture.end_ns - picture.begin_ns) / 5e9)
    width = scale * length * 1e9
    left = WIDTH - RIGHT - width
    yield f'<path d="M{left:.1f} 14v6h{width:.1f}v-6" fill="none" stroke="{look.soft}"/>'
    yield _remark(left - 6, 20, _seconds(length), look)


def _row(track: Track, top: float, x: Scale, colours: Mapping[str, str], look: Look) -> Iterator[str]:
    """A span around others is a thin line above them."""
    for span, following in zip_longest(track.spans, track.spans[1:]):
        left, right = x(span.begin_ns), x(span.end_ns)
        if right - left < LEAST:
            continue
        tip = f"{track.label}: {_what(span)}, {(span.end_ns - span.begin_ns) / 1e6:.2f} ms"
        if following is not None and span.begin_ns <= following.begin_ns < span.end_ns >= following.end_ns:
            yield _rect(left, top + 1, right - left, 2, "#777", tip)
        else:
            yield _rect(
                left, top + (ROW - BAND) / 2, right - left, BAND, colours.get(span.name, look.wait), tip
            )


def _what(span: Span) -> str:
    return f"{span.name} {span.number}" if span.number >= 0 else span.name


def _rect(left: float, top: float, width: float, height: float, colour: str, tip: str = "") -> str:
    shape = f'<rect x="{left:.2f}" y="{top:.1f}" width="{width:.2f}" height="{height}" fill="{colour}"'
    return f"{shape}><title>{escape(tip)}</title></rect>" if tip else f"{shape}/>"


def _label(text: str, y: float) -> str:
    return f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>'


def _remark(right: float, y: float, text: str, look: Look) -> str:
    return f'<text x="{right:.1f}" y="{y:.1f}" fill="{look.soft}" text-anchor="end">{text}</text>'


def _flow(flow: Flow, middles: dict[str, float], x: Scale, look: Look) -> str:
    source, drain = middles[flow.source], middles[flow.drain]
    return (
        f'<path d="M{x(flow.put_ns):.1f} {source:.1f}L{x(flow.drawn_ns):.1f} {drain:.1f}" '
        f'stroke="{look.ink}" stroke-opacity="0.25" fill="none"><title>batch {flow.batch}</title></path>'
    )


def _counter(
    name: str, points: tuple[tuple[int, int], ...], top: float, x: Scale, end_ns: int, look: Look
) -> Iterator[str]:
    yield _label(name, top + ROW / 2 + 4)
    if not points:
        return
    most = max(1, *(value for _, value in points))
    path, floor = f"M{x(points[0][0]):.1f} {top + ROW:.1f}", top + ROW
    for at_ns, value in points:
        path += f"H{x(at_ns):.1f}V{floor - ROW * value / most:.1f}"
    path += f"H{x(end_ns):.1f}V{floor:.1f}Z"
    yield f'<path d="{path}" fill="{look.depth}" stroke="{look.edge}" stroke-width="0.7"/>'
    yield _remark(WIDTH - RIGHT, top - 2, f"at most {most}", look)


def _legend(picture: Picture, y: float, colours: Mapping[str, str], look: Look) -> Iterator[str]:
    """Of what is there."""
    names = {span.name for track in picture.tracks for span in track.spans}
    left = float(RIGHT)
    for name in (*(name for name in colours if name in names), "wait"):
        yield _rect(left, y - 9, 10, 10, colours.get(name, look.wait))
        yield f'<text x="{left + 14:.0f}" y="{y}">{escape(name)}</text>'
        left += 28 + 6.2 * len(name)


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
