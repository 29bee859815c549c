"""Conversations in Parquet shards made ready for training: rate, memory, growth; other ways beside ours.

    python -m bench.scale [--rows 10000 100000] [--ways ours serial datasets] [--workers N] [--keep DIR]

The conversations are short ones, cut from the text of Python's standard library. Each measurement is a
process of its own, looked at twice a second together with its children: memory is what they have mapped,
shared pages counted once (PSS). `open` is what a trainer does with the cache that `ours` made: it maps it,
plans an epoch and builds batches. Pages of mapped files count in the peak; the system takes them back when
memory runs short."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from tabulate import tabulate

from bench.scale import ways
from steptime.machine.identity import identify

EVERY_S = 0.5


@dataclass(frozen=True)
class Seen:
    """One way at one size.

    Attributes:
        seconds: from the first row to the mapped cache; imports are left out.
        cpu_s: of all its processes, imports included, as last seen of each.
        peak_mb, anonymous_mb: most memory of all its processes together; without pages of mapped files.
        processes: most at a time.
    """

    way: str
    rows: int
    seconds: float
    cpu_s: float
    peak_mb: float
    anonymous_mb: float
    processes: int


def measure(way: str, data: Path, cache: Path, tokenizer: Path, rows: int, workers: int) -> Seen:
    """Run one way in a process of its own."""
    words = [sys.executable, "-m", "bench.scale.ways", way, data, cache, tokenizer, workers]
    process = subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE)
    tree = psutil.Process(process.pid)
    peak = anonymous = 0.0
    most = 1
    cpu_s: dict[int, float] = {}
    while process.poll() is None:
        total, own, count = _look(tree, cpu_s)
        peak, anonymous, most = max(peak, total), max(anonymous, own), max(most, count)
        time.sleep(EVERY_S)
    assert process.stdout is not None
    out = process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{way} at {rows:,} rows ended with {process.returncode}")
    said = json.loads(out)
    if said["samples"] != rows:
        raise SystemExit(f"{way}: {said['samples']:,} samples of {rows:,} rows")
    return Seen(way, rows, said["seconds"], sum(cpu_s.values()), peak, anonymous, most)


def _look(tree: psutil.Process, cpu_s: dict[int, float]) -> tuple[float, float, int]:
    """Memory of all and without mapped files, MB, and how many they are; notes their CPU time."""
    total = own = 0.0
    count = 0
    for process in _all(tree):
        try:
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            times = process.cpu_times()
        except (OSError, psutil.Error):
            continue
        cpu_s[process.pid] = times.user + times.system
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines()[1:]}
        total += sizes["Pss"] / 1024
        own += sizes.get("Pss_Anon", sizes["Pss"]) / 1024
        count += 1
    return total, own, count


def _all(tree: psutil.Process) -> list[psutil.Process]:
    try:
        return [tree, *tree.children(recursive=True)]
    except psutil.Error:
        return []


@dataclass(frozen=True)
class Growth:
    """How a way grows from the smallest size to the largest.

    Attributes:
        power: seconds grow as rows to this power, by least squares over the logarithms.
        mb_per_million: of memory without mapped files, by least squares.
    """

    way: str
    power: float
    mb_per_million: float


def growth(seen: Sequence[Seen]) -> list[Growth]:
    """One line for each way that was tried at two sizes or more."""
    found = []
    for way in dict.fromkeys(one.way for one in seen):
        own = [one for one in seen if one.way == way]
        rows = np.array([one.rows for one in own], np.float64)
        if len(set(rows)) < 2:
            continue
        power = np.polyfit(np.log(rows), np.log([one.seconds for one in own]), 1)[0]
        slope = np.polyfit(rows / 1e6, [one.anonymous_mb for one in own], 1)[0]
        found.append(Growth(way, float(power), float(slope)))
    return found


def show(seen: Sequence[Seen]) -> str:
    """The page's tables."""
    rows = [
        (
            one.way,
            f"{one.rows:,}",
            f"{one.seconds:.1f}",
            f"{one.rows / one.seconds:,.0f}",
            f"{1e3 * one.cpu_s / one.rows:.2f}",
            f"{one.peak_mb:,.0f}",
            f"{one.anonymous_mb:,.0f}",
            one.processes,
        )
        for one in seen
    ]
    head = ["way", "rows", "s", "rows/s", "CPU ms/row", "peak MB", "without mapped files", "processes"]
    text = tabulate(rows, head, tablefmt="github", disable_numparse=True)
    grown = [(one.way, f"{one.power:.2f}", f"{one.mb_per_million:,.0f}") for one in growth(seen)]
    if grown:
        lines = tabulate(grown, ["way", "seconds grow as rows to the power", "MB per million rows"], "github")
        text += f"\n\n{lines}"
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--ways", nargs="+", choices=sorted(ways.WAYS), default=["ours", "open"])
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--keep", type=Path, help="Folder for the data; made anew in a temporary one else.")
    given = parser.parse_args(arguments)
    folder = given.keep or Path(tempfile.mkdtemp(prefix="dflash-scale-"))
    seen = []
    try:
        tokenizer = ways.ready(folder)
        for rows in sorted(given.rows):
            data = ways.shards(folder, rows)
            for way in sorted(given.ways, key=lambda name: name == "open"):
                cache = folder / f"cache-{rows}" / ("ours" if way == "open" else way)
                if way != "open":
                    shutil.rmtree(cache, ignore_errors=True)
                seen.append(measure(way, data, cache, tokenizer, rows, given.workers))
                sys.stderr.write(f"{seen[-1]}\n")
    finally:
        if given.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{identify().key}, {given.workers} processes\n\n{show(seen)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
