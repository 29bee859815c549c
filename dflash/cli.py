"""The command line: `dflash prepare | train | eval | export | doctor`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import typer

from steptime import commandline
from steptime.errors import UserError

COMMANDS = ("prepare", "train", "eval", "export", "doctor")


def build_app() -> typer.Typer:
    """All commands; each registers itself, and imports what is heavy only when it runs."""
    import importlib

    app = commandline.make_app(
        help="Train DFlash drafters, and see where the time goes without paying for it."
    )
    for name in COMMANDS:
        importlib.import_module(f"dflash.commands.{name}").register(app)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. A user's mistake is one line on stderr and exit code 2."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    try:
        return commandline.call(build_app(), sys.argv[1:] if arguments is None else arguments, "dflash")
    except UserError as error:
        sys.stderr.write(f"dflash: error: {error}\n")
        return 2
    except (typer.Abort, KeyboardInterrupt):
        sys.stderr.write("dflash: interrupted\n")
        return 130


if __name__ == "__main__":
    main()
