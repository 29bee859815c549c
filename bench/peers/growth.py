"""How the drafter's step grows with each size: seconds and peak memory, a line c0 + c1 N through each.

    python -m bench.peers.growth [--rounds N] [--svg FILE] [--json FILE]

One size is changed at a time from a small shape, float32. The steps of one axis take turns inside every
round, so that a drifting machine slows them alike; a point is the median of its rounds, and the error of a
fit is the largest distance of a point from the line, as a share of the point. Peak memory is that of a
process of its own."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

from bench.peers.shapes import peak_bytes
from bench.peers.speed import Shape, in_turns, make_step

BASE = Shape(hidden=128, intermediate=384, layers=2, heads=2, kv_heads=1, batch=1)
AXES: dict[str, tuple[int, ...]] = {
    "context": (256, 512, 1024, 2048),
    "anchors": (16, 32, 64, 128),
    "block": (4, 8, 16, 32),
    "vocab": (2048, 4096, 8192, 16384),
    "layers": (1, 2, 4, 6),
}


@dataclass(frozen=True)
class Line:
    """y = c0 + c1 N.

    Attributes:
        error: largest distance of a point from the line, as a share of the point.
    """

    c0: float
    c1: float
    error: float


@dataclass(frozen=True)
class Axis:
    """One size changed, all others as in `BASE`; `memory` in bytes."""

    name: str
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    memory: tuple[int, ...]
    time_line: Line
    memory_line: Line


def fit(sizes: Sequence[float], values: Sequence[float]) -> Line:
    """The line with the smallest sum of squared relative distances.

    Raises:
        ValueError: fewer than three points, through which no line can be held.
    """
    if len(sizes) < 3:
        raise ValueError(f"{len(sizes)} points: a fit that can fail needs 3")
    n, y = np.asarray(sizes, dtype=np.float64), np.asarray(values, dtype=np.float64)
    columns = np.stack([1.0 / y, n / y], axis=1)
    (c0, c1), *_ = np.linalg.lstsq(columns, np.ones(len(n)), rcond=None)
    return Line(float(c0), float(c1), float(np.max(np.abs(columns @ np.array([c0, c1]) - 1.0))))


def measure(name: str, rounds: int) -> Axis:
    """Time and memory along one axis."""
    sizes = AXES[name]
    changes: list[dict[str, Any]] = [{name: size} for size in sizes]
    shapes = [replace(BASE, **change) for change in changes]
    steps = {str(size): make_step(shape)[0] for size, shape in zip(sizes, shapes, strict=True)}
    for step in steps.values():
        for _ in range(2):
            step()
    taken = in_turns(steps, rounds)
    seconds = tuple(float(np.median(taken[str(size)])) for size in sizes)
    memory = tuple(peak_bytes("ours", shape) for shape in shapes)
    return Axis(name, sizes, seconds, memory, fit(sizes, seconds), fit(sizes, memory))


def table(axes: Sequence[Axis]) -> str:
    """One line for each axis."""
    rows = [
        (
            axis.name,
            f"{axis.sizes[0]} to {axis.sizes[-1]}",
            _line(axis.time_line, 1e3, "ms"),
            f"{axis.time_line.error:.0%}",
            _line(axis.memory_line, 2.0**-20, "MiB"),
            f"{axis.memory_line.error:.0%}",
        )
        for axis in axes
    ]
    headers = ("N", "range", "step", "largest miss", "peak memory", "largest miss")
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def _line(line: Line, unit: float, name: str) -> str:
    return f"{line.c0 * unit:.3g} + {line.c1 * unit:.3g} N {name}"


def draw(axes: Sequence[Axis], path: Path) -> None:
    """A row of two plots for each axis: time and memory, points and lines."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "growth"
    figure, grid = plt.subplots(2, len(axes), figsize=(2.6 * len(axes), 5.0), layout="constrained")
    for column, axis in enumerate(axes):
        parts = (
            (axis.seconds, axis.time_line, 1e3, "ms per step"),
            (axis.memory, axis.memory_line, 2.0**-20, "peak MiB"),
        )
        n = np.array(axis.sizes)
        for row, (values, line, unit, label) in enumerate(parts):
            plot = grid[row][column]
            plot.plot(n, np.array(values) * unit, "o")
            plot.plot(n, (line.c0 + line.c1 * n) * unit, "-", linewidth=1)
            plot.set_ylim(bottom=0)
            plot.set_xlabel(axis.name)
            if column == 0:
                plot.set_ylabel(label)
    figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers.growth", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--axis", choices=AXES, action="append", help="may be given again; default: all")
    parser.add_argument("--svg", metavar="FILE", type=Path, help="draw the points and lines")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write points and lines")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    axes = [measure(name, options.rounds) for name in options.axis or AXES]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.rounds} rounds, {BASE}")
    print(table(axes))
    if options.svg:
        draw(axes, options.svg)
    if options.json:
        tree = {"schema": "dflash-growth/1", "base": asdict(BASE), "axes": [asdict(axis) for axis in axes]}
        options.json.write_text(json.dumps(tree, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
