"""`python -m bench gpu-check`: day one on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steptime import arguments, run_files
from steptime.arguments import option, to_names
from steptime.child_process import ROOT

if TYPE_CHECKING:
    from bench.gpu_check.stage import Stage

PAGE = ROOT / "docs" / "gpu-check.md"
NO_GPU = 2

EPILOG = """\b
exit codes:
  0 every stage is as claimed
  1 not: something differs, was not counted, not armed, or not run
  2 no CUDA device (what would be run is printed), or a usage error"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("gpu-check", epilog=EPILOG)(gpu_check)


def gpu_check(
    stages: Annotated[str, option("--stages A,B", "only these; docs/gpu-check.md is then left alone")] = "",
    out: arguments.Out = None,
) -> int:
    """Everything that only a GPU can show, in ten minutes at most: counts by every way, races, equal bits,
    speed, attention, overhead, gate, NVML. Writes docs/gpu-check.md."""
    from bench.gpu_check.registry import STAGES

    names = to_names(stages)
    chosen = STAGES.chosen(names) if names else tuple(STAGES)
    return check(chosen, out, None if names else PAGE)


def check(stages: Sequence[Stage], out: str | None, page_path: Path | None) -> int:
    """Run the stages; exit code. What each found lies in the folder as it ends, and so does the page.

    Args:
        page_path: where the page goes in the end, too; None: a part of the stages is no check.
    """
    import torch

    from bench.gpu_check.conductor import plan_table, run_stages, say
    from bench.gpu_check.page import Heading, page
    from steptime.machine import identity
    from steptime.machine.commit import read_commit

    if not torch.cuda.is_available():
        print("no CUDA device here: nothing is checked, and no page is written. On a GPU this would run:\n")
        print(plan_table(stages))
        return NO_GPU
    folder = run_files.choose_folder(out, "gpu-check")
    heading = Heading(run_files.now_utc(), identity.identify(), read_commit())
    text, red = "", True
    for outcomes in run_stages(stages, folder, say):
        text = page(heading, outcomes, part=page_path is None)
        red = any(outcome.red for outcome in outcomes)
        run_files.write(folder / "gpu-check.md", text)
    if page_path is not None:
        run_files.write(page_path, text)
    print(page_path or folder / "gpu-check.md")
    print("red" if red else "every stage is as claimed", file=sys.stderr)
    return int(red)
