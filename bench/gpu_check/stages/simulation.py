"""Stage: `syncs` simulates CUDA where there is no GPU. Here the same programs run both ways."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu_check.stage import Found, Table, rows_of
from steptime.child_process import run_python
from steptime.machine.commit import ROOT

PROGRAMS = ROOT / "tests" / "data" / "programs"
HABITS = ("plain", "numpy", "clipped", "pinned", "running", "float16", "workers")
RUNS = (*(("recipe.py", habit) for habit in HABITS), ("nanogpt_like.py",))
"""Programs of torch alone, and their arguments."""
LIMIT_S = 25.0
AT_ONCE = 2 * len(RUNS)
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


class Where(NamedTuple):
    """A row of `syncs --json`: which role waits, how, and at what line."""

    role: str
    kind: str
    place: str


Counts = Mapping[Where, int]


class SimulationStage:
    """Whole programs on the GPU, and once more with the GPU hidden."""

    name = "simulation"
    asks = "Does `syncs` without a GPU charge each line with the waits that it has on one?"
    seconds = 30

    def look(self) -> Found:
        with ThreadPoolExecutor(AT_ONCE) as pool:  # counts are exact, whatever else runs
            pairs = [
                (
                    " ".join(words),
                    pool.submit(_count, words, {}, simulated=False),
                    pool.submit(_count, words, NO_GPU, simulated=True),
                )
                for words in RUNS
            ]
        counted: dict[str, tuple[Counts, Counts]] = {}
        problems: list[str] = []
        for run, real, simulated in pairs:
            try:
                counted[run] = (real.result(), simulated.result())
            except ValueError as error:
                problems.append(f"{run}: {error}")
        return read(counted, problems)


def _count(words: tuple[str, ...], environment: Mapping[str, str], *, simulated: bool) -> Counts:
    """Raises ValueError when the run left no counts, or was counted in the other way."""
    with tempfile.TemporaryDirectory(prefix="steptime-simulation-") as folder:
        file = Path(folder) / "counts.json"
        options = ["-m", "steptime", "syncs", "--steps", "4", "--json", str(file), "--"]
        script = [str(PROGRAMS / words[0]), *words[1:]]
        ended = run_python([*options, *script], limit_s=LIMIT_S, environment=environment)
        if ended.code != 0 or not file.exists():
            raise ValueError(f"exit code {ended.code}: {ended.last_line}")
        return counts_of(json.loads(file.read_bytes()), simulated=simulated)


def counts_of(tree: Mapping[str, Any], *, simulated: bool) -> Counts:
    """Rows of a `syncs --json`. Pure. Raises ValueError when it was counted in the other way."""
    if tree["simulated"] is not simulated:
        raise ValueError(f"simulated is {tree['simulated']}, not {simulated}")
    return {Where(row["role"], row["kind"], row["where"]): row["count"] for row in tree["counts"]}


def read(counted: Mapping[str, tuple[Counts, Counts]], problems: list[str]) -> Found:
    """Holds the simulation's rows against the GPU's. Pure.

    Args:
        counted: by program: counts on the GPU, counts of the simulation.
        problems: runs that gave no counts.
    """
    looked_at, rows = 0, list[tuple[Any, ...]]()
    lines = list(problems)
    for run, (real, simulated) in counted.items():
        for where in sorted({*real, *simulated}):
            n, m = real.get(where, 0), simulated.get(where, 0)
            looked_at += 1
            rows.append((run, where.place, where.kind, n, m))
            if n != m:
                told = f"{where.kind} at {where.place} ({where.role})"
                lines.append(f"{run}: {told}: {n} on the GPU, {m} simulated")
    table = Table("Waits of four steps", ("program", "place", "kind", "GPU", "simulated"), rows_of(*rows))
    return Found(looked_at, "places", tuple(lines), (), (table,))
