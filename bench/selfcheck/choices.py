"""Why pairs are drawn and averaged as they are: what else was tried, on the same noise.

    python -m bench.selfcheck.choices [RECEIPT.json...] [--runs 2000]

Without receipts the noise is that of `pair_runs`. Two tables: what stands in for the mean, and how the signs
are drawn and the other switches taken off."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import hadamard
from tabulate import tabulate

from bench.selfcheck.pair_runs import Noise, made_up, stored_halves, stretches
from steptime.errors import UserError
from steptime.records.pairs import Layer
from steptime.statistics.effects import Sample, redraw

Floats = NDArray[np.float64]

PAIRS = 300
COST = 0.02
"""Log units; for the second table the cost of the switch that is looked at is 0."""
SWITCHES = 7
CENTRE_HEADS = ("centre", "standard error", "2% in every pair", "2% on one pair in 20")
DESIGN_HEADS = (
    "another costs",
    "pairs",
    "coins, as used",
    "nothing taken off",
    "least squares",
    "Hadamard",
    "its least p",
)
CENTRES = ("mean", "winsorised at 3", "winsorised at 2", "middle half")


def centre(values: Floats, kind: str) -> float:
    """The centre of signed differences. `winsorised at k`: cut off at k robust standard deviations of |y|,
    which flips leave alone."""
    if kind == "mean":
        return float(values.mean())
    if kind == "middle half":
        ranked = np.sort(values)
        cut = len(ranked) // 4
        return float(ranked[cut:-cut].mean())
    limit = float(kind.rsplit(" ", 1)[1]) * 1.4826 * float(np.median(np.abs(values)))
    return float(np.clip(values, -limit, limit).mean())


def centres(noise: Noise, runs: int, seed: int) -> list[list[str]]:
    """A row for each centre: its standard error for a cost of the same size in every pair, and what it makes
    of 2% that fall on one pair in twenty."""
    rng = np.random.default_rng(seed)
    found: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in CENTRES}
    for _ in range(runs):
        y = noise(rng, Layer.PATH, PAIRS) @ (1.0, -1.0) * rng.choice((-1.0, 1.0), PAIRS)
        rare = np.where(rng.random(PAIRS) < 0.05, 20 * COST, 0.0)
        for kind in CENTRES:
            found[kind].append((centre(y, kind), centre(y + COST, kind), centre(y + rare, kind)))
    rows = []
    for kind, values in found.items():
        free, every, few = np.array(values).T
        slope = float((every - free).mean()) / COST
        shares = (free.std() / slope, (every - free).mean(), (few - free).mean())
        rows.append([kind, *(f"{100 * share:.2f}%" for share in shares)])
    return rows


def designs(noise: Noise, runs: int, seed: int) -> list[list[str]]:
    """Standard error of a free switch beside five others that cost nothing and one that costs `other`."""
    rng = np.random.default_rng(seed)
    block = hadamard(8)[:, 1:].astype(np.float64)
    rows = []
    for other in (0.0, 0.05, 0.3):
        for pairs in (16, 32, 64, 256):
            found: list[tuple[float, ...]] = []
            for _ in range(runs // 4):
                y = noise(rng, Layer.PATH, pairs) @ (1.0, -1.0)
                coins = rng.choice((-1.0, 1.0), (pairs, SWITCHES))
                ours = Sample(Layer.PATH, tuple("abcdefg"), y + other * coins[:, 0], coins)
                table = np.hstack([np.ones((pairs, 1)), coins])
                squares = np.linalg.lstsq(table, ours.y, rcond=None)[0][2]
                blocks = np.vstack([block * rng.choice((-1, 1), SWITCHES) for _ in range(pairs // 8)])
                balanced = blocks[:, 1] @ (y + other * blocks[:, 0]) / pairs
                plain = coins[:, 1] @ ours.y / pairs
                used = redraw(ours, 0, rows=1).cost[1]
                found.append((float(used), float(plain), float(squares), float(balanced)))
            errors = 100 * np.array(found).std(axis=0)
            least = f"2^-{pairs // 8}"
            rows.append([f"{100 * other:g}%", f"{pairs}", *(f"{error:.2f}%" for error in errors), least])
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.selfcheck.choices", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="RECEIPT", help="receipts of overhead")
    parser.add_argument("--runs", type=int, default=2000, help="runs in each row (default 2000)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        noise = stretches(stored_halves(options.files)) if options.files else made_up()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for heads, rows in (
        (CENTRE_HEADS, centres(noise, options.runs, options.seed)),
        (DESIGN_HEADS, designs(noise, options.runs, options.seed)),
    ):
        print(tabulate(rows, heads, tablefmt="github", disable_numparse=True), end="\n\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
