"""`python -m bench syncs -- SCRIPT ARGS`: run any PyTorch program and print the host syncs of its steps."""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.syncs.count import SyncCount, count_syncs
from steptime.errors import UserError


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="python -m bench syncs",
        usage="%(prog)s [options] -- SCRIPT [ARGS ...]",
        description=(
            "Runs a PyTorch program and counts the places where the host waits for a GPU, by role, kind and "
            "line. Steps are those of its optimizer. Without a GPU it counts what would wait on one."
        ),
    )
    parser.add_argument(
        "--warmup", type=int, default=2, metavar="N", help="optimizer steps not counted (default %(default)s)"
    )
    parser.add_argument(
        "--device", metavar="D", help="cuda, cpu, or cpu:0 for a program that calls its device so"
    )
    parser.add_argument("--work", action="store_true", help="also list operations, allocations and copies")
    parser.add_argument("--json", metavar="FILE", help="write the counts")
    parser.add_argument("--fail", action="store_true", help="exit code 1 when a host sync was counted")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; its exit code, or 1 with `--fail` and a sync.

    Raises:
        UserError: there is no such script.
    """
    options = build_parser().parse_args(
        [word for word in (sys.argv[1:] if argv is None else argv) if word != "--"] if argv else argv
    )
    script = Path(options.script)
    if not script.is_file():
        raise UserError(f"python -m bench syncs: no such script: {script}")
    code, counted = run(
        script, options.arguments, device=options.device, warmup=options.warmup, work=options.work
    )
    print(report(counted, work=options.work))
    if options.json:
        Path(options.json).write_text(as_json(counted), encoding="utf-8")
    if counted.warmup and not counted.finished:
        print(
            "error: the program took no optimizer step, so nothing was counted after the warm-up of "
            f"{counted.warmup}",
            file=sys.stderr,
        )
        return code or 2
    return code or int(options.fail and counted.total > 0)


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
    """The table with a line above it."""
    if counted.steps:
        head = (
            f"{counted.total / counted.steps:g} host syncs in each of {counted.steps} steps (after "
            f"{counted.warmup} of warm-up)"
        )
    else:
        head = f"{counted.total} host syncs; the program marked no step"
    return f"{head}\n\n{counted.table(work=work)}"


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
