"""`python -m bench gpu-check`: everything about counting that needs a CUDA GPU, in under five minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.arguments import option


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("gpu-check")(gpu_check)


def gpu_check(
    out: Annotated[
        str,
        option("--out DIR", "folder for gpu-check.json and gpu-check.md (default gpu-check)"),
    ] = "gpu-check",
) -> int:
    """Everything about counting that needs a CUDA GPU, in under five minutes: one JSON and one Markdown page.

    Exit codes: 0 everything as claimed, 1 not, 4 no CUDA device and nothing written.
    """
    from bench.syncs.faults.gpu_check import check_gpu

    return check_gpu(Path(out))
