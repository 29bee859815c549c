"""Runs any PyTorch program and counts the host syncs of its steps."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from steptime.counting.count import SyncCount, count_syncs
from steptime.errors import UserError

INTERRUPTED = 130
"""Exit code of a program that Ctrl-C ended, as a shell has it."""


def rank() -> int | None:
    """The number that `torchrun` gave this process; None: it runs alone."""
    word = os.environ.get("RANK", "")
    return int(word) if word.isdigit() and os.environ.get("WORLD_SIZE", "1") != "1" else None


def run(
    script: Path | str,
    arguments: Sequence[str],
    *,
    device: str | None = None,
    warmup: int = 2,
    work: bool = False,
    steps: int | None = None,
    module: bool = False,
) -> tuple[int, SyncCount]:
    """Run a script as `python SCRIPT ARGS` (or `python -m MODULE ARGS`) would; its exit code and what was
    counted. An error of the script is printed, with its own traceback, and gives code 1; Ctrl-C gives 130.

    Args:
        steps: end the program after so many counted steps.

    Raises:
        UserError: the program asked for what cannot be simulated.
    """
    argv, path = sys.argv, list(sys.path)
    folder = os.getcwd() if module else str(Path(script).resolve().parent)
    sys.argv, sys.path[0:1] = [str(script), *arguments], [folder, *path[0:1]]
    number = rank()
    code = 0
    try:
        with count_syncs(
            device=device,
            warmup=warmup,
            work=work,
            role="main" if number is None else f"rank {number}",
            steps=steps,
        ) as counted:
            code = _execute(str(script), module)
    finally:
        sys.argv, sys.path[:] = argv, path
    return code, counted


def _execute(script: str, module: bool) -> int:
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as leave:
        if leave.code is not None and not isinstance(leave.code, int):
            print(leave.code, file=sys.stderr)
            return 1
        return leave.code or 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except UserError:
        raise
    except BaseException as error:
        _print_error(error)
        return 1
    return 0


def _print_error(error: BaseException) -> None:
    """The script's traceback, without the frames that ran it."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (
        __file__,
        runpy.__file__,
        "<frozen runpy>",
    ):
        frames = frames.tb_next
    traceback.print_exception(error.with_traceback(frames))
