"""`python -m bench syncs -- SCRIPT ARGS`: run any PyTorch program and print the host syncs of its steps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from steptime.arguments import option, to_natural
from steptime.errors import UserError


def register(app: typer.Typer) -> None:
    """Add the command. The options end at the script: what follows it is the script's own."""
    own = {"allow_extra_args": True, "allow_interspersed_args": False}
    app.command("syncs", options_metavar="[OPTIONS] -- SCRIPT [ARGS]...", context_settings=own)(syncs)


def syncs(
    context: typer.Context,
    warmup: Annotated[int, option("--warmup N", "optimizer steps not counted (default 2)", to_natural)] = 2,
    device: Annotated[
        str | None,
        option("--device D", "cuda, cpu, or cpu:0 for a program that calls its device so"),
    ] = None,
    work: Annotated[bool, option("--work", "also list operations, allocations and copies")] = False,
    json: Annotated[Path | None, option("--json FILE", "write the counts")] = None,
    fail: Annotated[bool, option("--fail", "exit code 1 when a host sync was counted")] = False,
) -> int:
    """Runs a PyTorch program and counts the places where the host waits for a GPU, by role, kind and line.
    Steps are those of its optimizer; without one the whole run counts. Without a GPU it counts what
    would wait on one.
    """
    from steptime.counting import run_script

    if not context.args:
        raise UserError("python -m bench syncs: SCRIPT is missing (see python -m bench syncs --help)")
    script, *words = context.args
    if not Path(script).is_file():
        raise UserError(f"python -m bench syncs: no such script: {script}")
    code, counted = run_script.run(Path(script), words, device=device, warmup=warmup, work=work)
    missing = run_script.nothing_counted(counted)
    if missing:
        print(f"error: {missing}", file=sys.stderr)
        return code or 2
    print(run_script.report(counted, work=work))
    if json:
        json.write_text(run_script.as_json(counted), encoding="utf-8")
    return code or int(fail and counted.total > 0)
