"""Two ranks beside one, in one run: what the agreement and the sum over gloo take.

    python -m bench.peers.ranks [--config FILE] [--set KEY=VALUE ...] [--rounds N] [--steps N]

Each process has one core of its own. Each round measures, tokens per second of whole runs of `dflash train`:

- alone: one process.
- apart: two processes that know nothing of each other, at the same time; what is lost here is lost to the
  machine (memory, caches, clock).
- ranks: two ranks of one run, each with a batch of every step.

Reported are medians over the rounds, with quartiles, never a lone time."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tabulate import tabulate

from steptime.cli import guarded
from steptime.errors import UserError

CONFIG = Path(__file__).parents[2] / "configs" / "cpu-tiny.toml"
QUIET = ("observe.collectors=[]", "observe.wandb=off", "observe.terminal=off", "train.hang_s=0")


@dataclass(frozen=True)
class Round:
    """Tokens per second of one process alone, of two apart (together), and of two ranks."""

    alone: float
    apart: float
    ranks: float

    @property
    def of_twice(self) -> float:
        """Two ranks over twice one process: the efficiency."""
        return self.ranks / (2 * self.alone)

    @property
    def of_apart(self) -> float:
        """Two ranks over two processes on the same cores: what exchange and waiting leave."""
        return self.ranks / self.apart


class Runs:
    """Starts whole runs, each process on a core of its own.

    Raises:
        UserError: fewer than two cores.
    """

    def __init__(self, config: Path | None, settings: Sequence[str], steps: int, folder: Path) -> None:
        self._cores = sorted(os.sched_getaffinity(0))[:2]
        if len(self._cores) < 2:
            raise UserError("two ranks need two cores, and this process may use one")
        self._config, self._folder, self._count = config, folder, 0
        self._settings = (*QUIET, f"train.steps={steps}", *settings)

    def round(self) -> Round:
        alone = self._finish([self._start(0, {})])
        apart = self._finish([self._start(core, {}) for core in (0, 1)])
        place = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": _free_port()}
        out = self._out()
        ranks = self._finish([self._start(rank, {**place, "RANK": rank}, out) for rank in (0, 1)])
        return Round(alone, apart, ranks)

    def _out(self) -> Path:
        self._count += 1
        return self._folder / str(self._count)

    def _start(
        self, core: int, place: Mapping[str, int], out: Path | None = None
    ) -> tuple[subprocess.Popen[str], Path]:
        out = out or self._out()
        command = [sys.executable, "-m", "dflash", "train", "--out", str(out)]
        command += [] if self._config is None else ["--config", str(self._config)]
        for setting in self._settings:
            command += ["--set", setting]
        environment = os.environ | {key: str(value) for key, value in place.items()}
        environment |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        taskset = ["taskset", "--cpu-list", str(self._cores[core])]
        return subprocess.Popen(
            [*taskset, *command],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ), out

    def _finish(self, processes: Sequence[tuple[subprocess.Popen[str], Path]]) -> float:
        """Tokens per second of the runs together."""
        for process, _ in processes:
            _, said = process.communicate()
            if process.returncode:
                raise UserError(f"a run ended with exit code {process.returncode}: {said.splitlines()[-1]}")
        return sum(
            float(json.loads((out / "summary.json").read_text(encoding="utf-8"))["tokens_per_second"])
            for out in {out for _, out in processes}
        )


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port


def table(rounds: Sequence[Round]) -> str:
    """Medians with quartiles over the rounds."""

    def row(name: str, values: Sequence[float], scale: float, unit: str) -> list[str]:
        low, middle, high = (scale * float(part) for part in np.percentile(values, (25, 50, 75)))
        return [name, f"{middle:,.1f}{unit}", f"{low:,.1f} to {high:,.1f}"]

    rows = [
        row("one process, tok/s", [one.alone for one in rounds], 1, ""),
        row("two apart, tok/s", [one.apart for one in rounds], 1, ""),
        row("two ranks, tok/s", [one.ranks for one in rounds], 1, ""),
        row("two ranks of twice one process", [one.of_twice for one in rounds], 100, "%"),
        row("two ranks of two apart", [one.of_apart for one in rounds], 100, "%"),
    ]
    return tabulate(rows, ("", "median", "quartiles"), colalign=("left", "right", "right"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers.ranks")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory(prefix="dflash-ranks-") as folder:
        runs = Runs(options.config, options.settings, options.steps, Path(folder))
        for number in range(1, options.rounds + 1):
            rounds.append(runs.round())
            last = rounds[-1]
            sys.stderr.write(
                f"round {number} of {options.rounds}: {last.of_twice:.1%} of twice one process, "
                f"{last.of_apart:.1%} of two apart\n"
            )
    sys.stdout.write(f"{table(rounds)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
