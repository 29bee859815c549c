"""Runs any PyTorch program and reports the host syncs of its steps."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from steptime.counting.count import SyncCount, count_syncs


def run(
    script: Path, arguments: Sequence[str], *, device: str | None = None, warmup: int = 2, work: bool = False
) -> tuple[int, SyncCount]:
    """Run a script as `python SCRIPT ARGS` would; its exit code and what was counted."""
    argv, path = sys.argv, list(sys.path)
    sys.argv, sys.path[0:1] = [str(script), *arguments], [str(script.resolve().parent), *path[0:1]]
    code = 0
    try:
        with count_syncs(device=device, warmup=warmup, work=work) as counted:
            try:
                runpy.run_path(str(script), run_name="__main__")
            except SystemExit as leave:
                code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    finally:
        sys.argv, sys.path[:] = argv, path
    return code, counted


def report(counted: SyncCount, *, work: bool = False) -> str:
    """The table with a line above it; where nothing was counted, that alone."""
    if counted.steps:
        head = (
            f"{counted.total / counted.steps:g} host syncs in each of {counted.steps} steps (after "
            f"{counted.warmup} of warm-up)"
        )
    elif counted.finished:
        return nothing_counted(counted)
    else:
        head = f"{counted.total} host syncs in the whole run, which took no optimizer step"
    graphs = counted.graphs
    tail = f"\n\n{graphs} compiled graphs ran; inside one only waits are seen." if graphs and work else ""
    return f"{head}\n\n{counted.table(work=work)}{tail}"


def nothing_counted(counted: SyncCount) -> str:
    """Why there are no counts, in one line; empty when there are."""
    if counted.steps or not counted.finished:
        return ""
    return (
        f"nothing was counted: all {counted.finished} optimizer steps belong to the warm-up of "
        f"{counted.warmup} (see --warmup)"
    )


def as_json(counted: SyncCount) -> str:
    """Schema `dflash-syncs/1`: steps, and one entry for each role, kind and place."""
    rows = [
        {"role": role, "kind": kind, "where": str(place), "count": count}
        for (role, kind, place), count in sorted(counted.counts.items())
    ]
    tree = {
        "schema": "dflash-syncs/1",
        "steps": counted.steps,
        "warmup": counted.warmup,
        "syncs": counted.total,
        "counts": rows,
    }
    return json.dumps(tree, indent=1)
