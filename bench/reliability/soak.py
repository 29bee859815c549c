"""A long run of the default config with every collector on: `python -m bench.reliability.soak` makes
docs/soak.md.

Looks at the training process from outside every few seconds: memory, threads, last step. What is asked is
whether any of them drifts. Samples that lie near each other are alike, so the drift and its interval come
from the means of blocks (method of batch means)."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from scipy import special

from steptime.machine.commit import read_commit
from steptime.machine.identity import identify
from steptime.progress import Reporter, human_time

CONFIG = "configs/cpu-tiny.toml"
SETTINGS = (
    "train.steps=100000000",
    "train.checkpoint_every=200",
    "observe.terminal=off",
    "observe.wandb=off",
)
EVERY_S = 5.0
WARMUP = 0.2
"""Share of the run that is left out: caches fill, the allocator settles."""
BLOCKS = 10
LEAK_PERCENT, SLOWER_PERCENT = 1.0, 3.0
"""Less growth of memory, less loss of rate over the run counts as none, however sure it is."""
GUARDED_STEPS = 40


@dataclass(frozen=True, slots=True)
class Sample:
    """One look: seconds since the start, resident bytes, threads, the last step that is written down."""

    time_s: float
    rss_bytes: int
    threads: int
    step: int


@dataclass(frozen=True, slots=True)
class Drift:
    """Change over the kept part of the run, as percent of the mean, with its two-sided 95% interval."""

    percent: float
    low: float
    high: float


def drift(times_s: Sequence[float], values: Sequence[float], blocks: int = BLOCKS) -> Drift:
    """A line through the means of equal blocks; its error from their scatter around it, with `blocks - 2`
    degrees of freedom.

    Raises:
        ValueError: fewer than two samples a block.
    """
    if len(values) < 2 * blocks:
        raise ValueError(f"{len(values)} samples are too few for {blocks} blocks of two")
    t = np.array([part.mean() for part in np.array_split(np.asarray(times_s, dtype=np.float64), blocks)])
    y = np.array([part.mean() for part in np.array_split(np.asarray(values, dtype=np.float64), blocks)])
    x = (t - t.mean()) / (times_s[-1] - times_s[0])
    slope = float(x @ y / (x @ x))
    rest = y - y.mean() - slope * x
    error = float(np.sqrt(rest @ rest / (blocks - 2) / (x @ x)))
    half = float(special.stdtrit(blocks - 2, 0.975)) * error
    scale = 100.0 / float(y.mean()) if y.mean() else 0.0
    return Drift(scale * slope, scale * (slope - half), scale * (slope + half))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the samples say.

    Attributes:
        memory, rate: their drifts.
        threads: fewest and most, in the first and in the last block.
        faults: one line for each thing that is not flat.
    """

    memory: Drift
    rate: Drift
    threads: tuple[int, int, int, int]
    faults: tuple[str, ...]


def judge(samples: Sequence[Sample]) -> Verdict:
    """Pure: is it flat?"""
    kept = [one for one in samples if one.time_s >= WARMUP * samples[-1].time_s]
    times = [one.time_s for one in kept]
    memory = drift(times, [float(one.rss_bytes) for one in kept])
    rates = [(b.step - a.step) / (b.time_s - a.time_s) for a, b in itertools.pairwise(kept)]
    rate = drift(times[1:], rates)
    size = max(1, len(kept) // BLOCKS)
    first, last = [one.threads for one in kept[:size]], [one.threads for one in kept[-size:]]
    faults = []
    if memory.low > 0 and memory.percent > LEAK_PERCENT:
        faults.append(f"memory grows by {_told(memory)} over the run")
    if rate.high < 0 and rate.percent < -SLOWER_PERCENT:
        faults.append(f"the rate changes by {_told(rate)} over the run")
    if min(last) > max(first):
        faults.append(f"threads: {max(first)} at first, {min(last)} at last")
    if kept[-1].step <= kept[0].step:
        faults.append("no step was made")
    return Verdict(memory, rate, (min(first), max(first), min(last), max(last)), tuple(faults))


def _told(found: Drift) -> str:
    return f"{found.percent:+.2f}% [{found.low:+.2f}, {found.high:+.2f}]"


def last_step(path: Path) -> int:
    """Of `metrics.jsonl`; -1 before its first row."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65536))
            lines = file.read().split(b"\n")[1:-1]
    except OSError:
        return -1
    for line in reversed(lines):
        step = json.loads(line).get("step")
        if isinstance(step, int):
            return step
    return -1


def watch(process: subprocess.Popen[bytes], rows: Path, minutes: float, reporter: Reporter) -> list[Sample]:
    """Look until the minutes are over, or the process has ended."""
    seen = psutil.Process(process.pid)
    began, found = time.monotonic(), list[Sample]()
    while process.poll() is None and time.monotonic() - began < 60.0 * minutes:
        time.sleep(EVERY_S)
        step = last_step(rows)
        if step >= 0 and process.poll() is None:
            now = time.monotonic() - began
            found.append(Sample(now, seen.memory_info().rss, seen.num_threads(), step))
        if len(found) % 24 == 1:
            left = human_time(max(0.0, 60.0 * minutes - (time.monotonic() - began)))
            reporter.say(f"soak: step {step}, {len(found)} looks, {left} to go")
    return found


def train_command(out: Path, *more: str) -> list[str]:
    command = [sys.executable, "-m", "dflash", "train", "--config", CONFIG, "--out", str(out)]
    return [*command, *(word for setting in (*SETTINGS, *more) for word in ("--set", setting))]


def run(minutes: float, folder: Path, reporter: Reporter) -> tuple[list[Sample], int]:
    """Train for so long; the samples, and the exit code after SIGTERM."""
    out = folder / "run"
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(train_command(out), stdout=log, stderr=log)
        try:
            samples = watch(process, out / "metrics.jsonl", minutes, reporter)
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(timeout=300)
    return samples, code


def guarded(folder: Path) -> int:
    """Steps under `--sync-guard disallow` with a checkpoint every five of them: the exit code."""
    more = (f"train.steps={GUARDED_STEPS}", "train.checkpoint_every=5")
    command = [*train_command(folder / "guarded", *more), "--sync-guard", "disallow"]
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode


def page(samples: Sequence[Sample], verdict: Verdict, code: int, guard: int) -> str:
    """Markdown."""
    kept_s = samples[-1].time_s
    steps = samples[-1].step - samples[0].step
    memory, rate, threads = verdict.memory, verdict.rate, verdict.threads
    rss_mb = np.mean([one.rss_bytes for one in samples]) / 1e6
    commit = read_commit()
    lines = [
        "# A long run",
        "",
        "Made by `python -m bench.reliability.soak`: `dflash train` with `configs/cpu-tiny.toml`, every",
        f"collector on, a checkpoint every 200 steps, float32, for {human_time(kept_s)} on {identify().key},",
        f"commit {commit.id[:10]}. {steps:,} steps, {len(samples)} looks from outside; the first",
        f"{100 * WARMUP:.0f}% are left out. A change is over the kept part of the run, from the means of",
        f"{BLOCKS} blocks.",
        "",
        "| what | mean | change [95%] |",
        "|---|---|---|",
        f"| resident memory | {rss_mb:,.0f} MB | {_told(memory)} |",
        f"| steps a second | {steps / kept_s:.2f} | {_told(rate)} |",
        f"| threads | {threads[0]} to {threads[1]} | {threads[2]} to {threads[3]} at the end |",
        "",
        f"Ended by SIGTERM with exit code {code} (143 is promised). {GUARDED_STEPS} steps under",
        f"`--sync-guard disallow` with a checkpoint every five: exit code {guard} (0: no step waited).",
        "",
        *(f"- NOT FLAT: {fault}" for fault in verdict.faults),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 when something is not flat, or an ending is not the promised one."""
    parser = argparse.ArgumentParser(prog="python -m bench.reliability.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=Path("docs/soak.md"))
    options = parser.parse_args(arguments)
    os.environ.setdefault("WANDB_MODE", "offline")
    with tempfile.TemporaryDirectory(prefix="dflash-soak-") as name:
        samples, code = run(options.minutes, Path(name), Reporter())
        if len(samples) < 4 * BLOCKS:
            log = (Path(name) / "log.txt").read_text(encoding="utf-8", errors="replace")
            print(f"error: {len(samples)} looks are too few; {log[-500:]}", file=sys.stderr)
            return 2
        guard = guarded(Path(name))
    verdict = judge(samples)
    text = page(samples, verdict, code, guard)
    options.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return int(bool(verdict.faults) or code != 143 or guard != 0)


if __name__ == "__main__":
    sys.exit(main())
