"""Time, peak memory, operations and host syncs of our drafter's step beside the peers', over several shapes.

    python -m bench.peers.shapes [--pairs N] [--shape CONTEXT/ANCHORS/V ...] [--rows FILE] [--table]

(`nox -s peers` does.) A peer's step and ours run in pairs, which of the two comes first by a coin; the ratio
of their times and its interval come from the statistics that judge a collector's cost. Memory is a process's
peak over what it held once its libraries were imported, so each trainer has a process of its own. A shape's
line goes to the file of rows when it is done, and a second start skips what is there; `--table` prints the
table of that file and measures nothing. bfloat16 is left out, with a line, where the processor has no
instructions for it."""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import itertools
import json
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from bench.peers.shape_rows import (
    Line,
    Origin,
    Ratio,
    Row,
    State,
    add_line,
    caption,
    known,
    latest,
    read_lines,
    table,
)
from bench.peers.speed import MAKERS, Shape, Step
from steptime.counting.count import count_syncs
from steptime.errors import UserError
from steptime.machine.commit import read_commit
from steptime.machine.identity import identify
from steptime.machine.state import foreign_share, read_state, steal_share
from steptime.records.pairs import Layer
from steptime.records.types import MachineState
from steptime.run_files import DEFAULT_ROOT, now_utc
from steptime.statistics.effects import Sample, redraw, total
from steptime.syncs.scopes import OPERATION

SHAPES = {
    f"{context}/{anchors}/{vocab}": Shape(context=context, anchors=anchors, vocab=vocab)
    for vocab, context, anchors in itertools.product((2048, 32768), (512, 2048), (32, 128))
}
"""By context, anchors and V, all else as in `Shape`: the quick ones first."""
ROWS = DEFAULT_ROOT / "peers-shapes.jsonl"
PEERS = tuple(name for name in MAKERS if name != "ours")
MIN_PAIRS = 6
"""Below it no interval of 90% exists: the smallest p of a one-sided test is 2^-pairs."""
WARMUP = 2


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


def measure(shape: Shape, pairs: int, origin: Origin) -> Line:
    """Compare at one shape, with the state of the machine around it."""
    commit = read_commit()
    before = read_state()
    rows = compare(shape, pairs)
    after = read_state()
    return Line(
        shape,
        origin,
        commit.id[:10] + "+" * commit.dirty,
        now_utc(),
        pairs,
        state_between(before, after),
        tuple(rows),
    )


def state_between(before: MachineState, after: MachineState) -> State:
    """What others did to the machine between two readings."""
    return State(before.load_1m, foreign_share(before, after), steal_share(before, after), after.cpu_mhz)


def sweep(
    shapes: Sequence[Shape], pairs: int, origin: Origin, rows: Path, by: Callable[..., Line] = measure
) -> Iterator[tuple[Line, bool]]:
    """A line for each shape, and whether it was measured now. Each is on the disk before it is given out.

    Raises:
        UserError: the file of rows cannot be read or written.
    """
    for shape in shapes:
        found = known(read_lines(rows), shape, origin, pairs)
        if found is not None:
            yield found, False
            continue
        line = by(shape, pairs, origin)
        add_line(rows, line)
        yield line, True


def versions() -> str:
    """The peers' and torch's versions."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", *PEERS))


def fast_bf16(info: Callable[[], str] = lambda: Path("/proc/cpuinfo").read_text(encoding="utf-8")) -> bool:
    """Whether the processor multiplies bfloat16 by instructions of its own."""
    return any(flag in info() for flag in ("amx_bf16", "avx512_bf16"))


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print; exit code 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers.shapes", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--pairs", type=int, default=8, help=f"with each peer, at least {MIN_PAIRS}")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="may be given again; default: all")
    parser.add_argument("--rows", metavar="FILE", type=Path, default=ROWS, help=f"default: {ROWS}")
    parser.add_argument("--table", action="store_true", help="print the file's table, measure nothing")
    parser.add_argument("--peak-of", choices=MAKERS, help=argparse.SUPPRESS)
    parser.add_argument("--as-json", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    if options.peak_of:
        print(_peak_here(options.peak_of, Shape(**json.loads(options.as_json))))
        return 0
    if options.pairs < MIN_PAIRS:
        parser.error(f"--pairs {options.pairs}: at least {MIN_PAIRS}")
    try:
        if not options.table:
            _measure_all(options.shape or list(SHAPES), options.pairs, options.rows)
        lines = latest(read_lines(options.rows))
    except ImportError as error:
        print(f"error: a peer is not installed: {error} (nox -s peers installs them)", file=sys.stderr)
        return 2
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(caption(lines))
    print(table(lines))
    return 0


def _measure_all(names: Sequence[str], pairs: int, rows: Path) -> None:
    """Every shape in every precision that this processor has; a line of progress for each."""
    dtypes = ["fp32", "bf16"] if fast_bf16() else ["fp32"]
    if len(dtypes) == 1:
        print("bf16: left out, this processor has no bfloat16 instructions (amx_bf16, avx512_bf16)")
    origin = Origin(identify(()).key, versions(), torch.get_num_threads())
    shapes = [replace(SHAPES[name], dtype=dtype) for dtype in dtypes for name in names]
    for line, now in sweep(shapes, pairs, origin, rows):
        shape = line.shape
        ratios = ", ".join(f"{row.trainer} {row.ratio}" for row in line.rows if row.ratio is not None)
        had = "" if now else f" (of {line.date}, in {rows})"
        print(f"{shape.dtype} {shape.context}/{shape.anchors}/{shape.vocab}: {ratios}{had}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
