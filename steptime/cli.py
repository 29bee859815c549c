"""`steptime overhead | gate | baseline | syncs`, or `python -m steptime ...`: what measures any trainer."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence

import typer

from steptime import commandline
from steptime.errors import UserError

PROGRAM = "steptime"
COMMANDS = {
    "overhead": "what does each callback, logger or collector cost?",
    "gate": "is this commit slower than that one?",
    "baseline": "are we drifting from the stored figure?",
    "syncs": "count the host syncs of any PyTorch program",
}
HELP = "Finds what makes a PyTorch training step wait, and what its callbacks cost."
EPILOG = """\b
exit codes:
  0 within budget
  1 over budget, or an exact count rose
  2 usage or tool error
  3 slower or unresolved
  4 invalid, or another machine
  5 no baseline, or an incomplete set"""


def build_app(
    words: Sequence[str],
    commands: Mapping[str, str] = COMMANDS,
    package: Callable[[str], str] = lambda name: "steptime",
    help: str = HELP,
) -> typer.Typer:
    """The command line for these words. Commands import much, so only the one that is called is imported.

    Args:
        commands: names and the question that each one answers.
        package: whose command a name is.
    """
    names = {"help_option_names": ["-h", "--help"]}
    app = commandline.make_app(help=help, epilog=EPILOG, rich_markup_mode=None, context_settings=names)
    for name, question in commands.items():
        if name in words[:1]:
            importlib.import_module(f"{package(name)}.commands.{name.replace('-', '_')}").register(app)
        else:
            app.command(name, help=question)(lambda: None)
    return app


def call(words: Sequence[str]) -> int:
    """Run one command; its exit code. Raises UserError for a mistake of the user."""
    if list(words) == ["syncs"]:
        words = ["syncs", "--help"]
    return commandline.call(build_app(words), words, PROGRAM)


def guarded(run: Callable[[], int]) -> int:
    """The exit code of a command. A mistake of the user is one line on stderr and code 2."""
    try:
        return run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
    except BrokenPipeError:
        pass
    except Exception:
        # Python's own exit code for this would be 1, which says "over budget".
        traceback.print_exc()
        print("error: the harness failed; this is no verdict (exit code 2)", file=sys.stderr)
    return 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    return guarded(lambda: call(words))
