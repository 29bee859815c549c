"""Time, peak memory, operations and host syncs of our drafter's step beside the peers', over several shapes.

    python -m bench.peers.shapes [--pairs N] [--shape NAME ...] [--json FILE]    (nox -s peers does)

A peer's step and ours run in pairs, which of the two comes first by a coin; the ratio of their times and its
interval come from the statistics that judge a collector's cost. Memory is a process's peak over what it held
once its libraries were imported, so each trainer has a process of its own. Rows are dated and name the
peers' versions. bfloat16 is left out, with a line, where the processor has no instructions for it."""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tabulate import tabulate

from bench.peers.speed import MAKERS, Shape, Step
from steptime.counting.count import count_syncs
from steptime.records.pairs import Layer
from steptime.statistics.effects import Sample, redraw, total
from steptime.syncs.scopes import OPERATION

BASE = Shape()
SHAPES = {
    "base": BASE,
    "long context": replace(BASE, context=2048),
    "large vocabulary": replace(BASE, vocab=32768),
    "few anchors": replace(BASE, anchors=8),
    "many anchors": replace(BASE, anchors=128),
}
"""One thing changed at a time."""
PEERS = tuple(name for name in MAKERS if name != "ours")
MIN_PAIRS = 6
"""Below it no interval of 90% exists: the smallest p of a one-sided test is 2^-pairs."""
WARMUP = 2


@dataclass(frozen=True)
class Ratio:
    """A peer's time over ours, with the bounds of its two-sided 90% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Row:
    """One trainer at one shape.

    Attributes:
        seconds: of each step in a pair; ours are those of the pairs with every peer.
        ratio: None for ours.
    """

    trainer: str
    seconds: list[float]
    ratio: Ratio | None
    peak_bytes: int
    operations: int
    syncs: float


def in_pairs(peer: Step, ours: Step, pairs: int, seed: int) -> tuple[list[float], list[float], list[int]]:
    """Seconds of the peer's steps and of ours by pair, and +1 where the peer's came first."""
    coin = random.Random(seed)
    theirs, own, signs = [], [], []
    for _ in range(pairs):
        sign = coin.choice((1, -1))
        both = [_seconds(step) for step in ((peer, ours) if sign > 0 else (ours, peer))]
        theirs.append(both[0 if sign > 0 else 1])
        own.append(both[1 if sign > 0 else 0])
        signs.append(sign)
    return theirs, own, signs


def _seconds(step: Step) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def ratio_of(theirs: Sequence[float], own: Sequence[float], signs: Sequence[int]) -> Ratio:
    """The peer's time over ours, by the estimator and the test that judge what a collector costs.

    Raises:
        ValueError: fewer than `MIN_PAIRS` pairs.
    """
    if len(signs) < MIN_PAIRS:
        raise ValueError(f"{len(signs)} pairs: an interval needs {MIN_PAIRS}")
    column = np.array(signs, dtype=np.float64)
    losses = column * np.log(np.array(theirs) / np.array(own))
    found = total(
        [redraw(Sample(Layer.PATH, ("peer",), losses, column[:, None]), 0, exact=True)], "peer", 0.0
    )
    return Ratio(*(1.0 / (1.0 - percent / 100.0) for percent in (found.percent, found.low, found.high)))


def counts_of(step: Step) -> tuple[int, float]:
    """Operations and host syncs of one step, by the counter of docs/syncs.md."""
    with count_syncs(device="cpu", warmup=1, work=True) as counted:
        for _ in range(3):
            marked = counted.finished
            step()
            if counted.finished == marked:  # not one of torch's optimizers
                counted.step()
    return round(counted.work(OPERATION) / counted.steps), counted.total / counted.steps


def peak_bytes(trainer: str, shape: Shape) -> int:
    """Peak memory of three steps in a process of its own, over what its imports hold.

    Raises:
        RuntimeError: the process failed.
    """
    command = [sys.executable, "-W", "ignore", "-m", "bench.peers.shapes", "--peak-of", trainer]
    done = subprocess.run([*command, "--as-json", json.dumps(asdict(shape))], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{trainer} at {shape}: {done.stderr.strip().splitlines()[-1:]}")
    return int(done.stdout.strip().splitlines()[-1])


def _peak_here(trainer: str, shape: Shape) -> int:
    """As `peak_bytes`, in this process: a tiny step first, so that what is imported late is there."""
    tiny = replace(shape, hidden=64, intermediate=64, vocab=64, context=64, anchors=2, layers=1)
    MAKERS[trainer](tiny)[0]()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status_bytes("VmRSS")
    step, _ = MAKERS[trainer](shape)
    for _ in range(3):
        step()
    return _status_bytes("VmHWM") - before


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def compare(shape: Shape, pairs: int) -> list[Row]:
    """Every trainer at one shape, ours last."""
    torch.manual_seed(0)
    ours, _ = MAKERS["ours"](shape)
    _warm(ours)
    rows, own = [], []
    for seed, name in enumerate(PEERS):
        step, _ = MAKERS[name](shape)
        _warm(step)
        theirs, with_it, signs = in_pairs(step, ours, pairs, seed)
        own += with_it
        rows.append(_row(name, shape, theirs, ratio_of(theirs, with_it, signs), step))
        del step
        gc.collect()
    return [*rows, _row("ours", shape, own, None, ours)]


def _warm(step: Step) -> None:
    for _ in range(WARMUP):
        step()


def _row(name: str, shape: Shape, seconds: list[float], ratio: Ratio | None, step: Step) -> Row:
    return Row(name, seconds, ratio, peak_bytes(name, shape), *counts_of(step))


def table(found: dict[str, list[Row]]) -> str:
    """One line for each shape and trainer."""
    body = [
        (
            name,
            row.trainer,
            f"{np.median(row.seconds) * 1e3:.0f}",
            ""
            if row.ratio is None
            else f"{row.ratio.value:.2f} ({row.ratio.low:.2f} to {row.ratio.high:.2f})",
            f"{row.peak_bytes / 2**20:.0f}",
            row.operations,
            f"{row.syncs:g}",
        )
        for name, rows in found.items()
        for row in rows
    ]
    headers = ("shape", "trainer", "ms/step", "its time / ours (90%)", "peak MiB", "operations", "host syncs")
    return tabulate(body, headers=headers, tablefmt="github", disable_numparse=True)


def versions() -> str:
    """The peers' and torch's versions."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", *PEERS))


def fast_bf16(info: Callable[[], str] = lambda: Path("/proc/cpuinfo").read_text(encoding="utf-8")) -> bool:
    """Whether the processor multiplies bfloat16 by instructions of its own."""
    return any(flag in info() for flag in ("amx_bf16", "avx512_bf16"))


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers.shapes", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--pairs", type=int, default=8, help=f"with each peer, at least {MIN_PAIRS}")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="may be given again; default: all")
    parser.add_argument("--json", metavar="FILE", help="write what was measured")
    parser.add_argument("--peak-of", choices=MAKERS, help=argparse.SUPPRESS)
    parser.add_argument("--as-json", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    if options.peak_of:
        print(_peak_here(options.peak_of, Shape(**json.loads(options.as_json))))
        return 0
    if options.pairs < MIN_PAIRS:
        parser.error(f"--pairs {options.pairs}: at least {MIN_PAIRS}")
    dtypes = ["fp32", "bf16"] if fast_bf16() else ["fp32"]
    found: dict[str, list[Row]] = {}
    try:
        for dtype in dtypes:
            for name in options.shape or SHAPES:
                shape = replace(SHAPES[name], dtype=dtype)
                found[f"{name}, {dtype}"] = compare(shape, options.pairs)
    except ImportError as error:
        print(f"error: a peer is not installed: {error} (nox -s peers installs them)", file=sys.stderr)
        return 2
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    print(f"{today}, {versions()}, {torch.get_num_threads()} threads, {options.pairs} pairs with each peer")
    print(table(found))
    if len(dtypes) == 1:
        print("bf16: left out, this processor has no bfloat16 instructions (amx_bf16, avx512_bf16)")
    if options.json:
        tree = {name: [asdict(row) for row in rows] for name, rows in found.items()}
        kept = {"schema": "dflash-peers-shapes/1", "date": today, "versions": versions(), "shapes": tree}
        Path(options.json).write_text(json.dumps(kept, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
