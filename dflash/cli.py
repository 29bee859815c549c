"""The command line: `dflash prepare | train | eval | export | doctor`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# Set before anything imports torch: CUDA reads it once. A user's own setting stays.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import typer

from steptime.errors import UserError

# Typer carries a copy of click in some releases and uses the package in others; the class is the base of its
# own errors.
_UsageError: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)  # type: ignore[assignment, misc]

COMMANDS = ("prepare", "train", "eval", "export", "doctor")


def build_app() -> typer.Typer:
    """All commands; each registers itself, and imports what is heavy only when it runs."""
    import importlib

    app = typer.Typer(
        name="dflash",
        help="Train DFlash drafters, and see where the time goes without paying for it.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for name in COMMANDS:
        importlib.import_module(f"dflash.commands.{name}").register(app)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. A user's mistake is one line on stderr and exit code 2."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    command = typer.main.get_command(build_app())
    try:
        result = command.main(
            args=list(arguments) if arguments is not None else None, prog_name="dflash", standalone_mode=False
        )
    except UserError as error:
        sys.stderr.write(f"dflash: error: {error}\n")
        return 2
    except _UsageError as error:
        text = error.format_message()  # type: ignore[attr-defined]
        sys.stderr.write(
            f"{text}\n" if type(error).__name__ == "NoArgsIsHelpError" else f"dflash: error: {text}\n"
        )
        return 2
    except (typer.Abort, KeyboardInterrupt):
        sys.stderr.write("dflash: interrupted\n")
        return 130
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    main()
