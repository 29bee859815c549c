"""`python -m bench overhead | gate | baseline | selfcheck | syncs | gpu-check`."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

import typer

from steptime import commandline
from steptime.errors import UserError

PROGRAM = "python -m bench"
COMMANDS = {
    "overhead": "what does each collector cost?",
    "gate": "is this commit slower than that one?",
    "baseline": "are we drifting from the stored figure?",
    "selfcheck": "how often is the harness wrong?",
    "syncs": "count the host syncs of any PyTorch program",
    "gpu-check": "day one on a GPU: is everything as claimed there?",
}
SHARED = ("syncs",)
"""Those of `steptime`: they serve any trainer."""
HELP = "Measures what the trainer's metrics cost, and whether one commit is slower than another."
EPILOG = """\b
exit codes:
  0 within budget
  1 over budget, or an exact count rose
  2 usage or tool error
  3 slower or unresolved
  4 invalid, or another machine
  5 no baseline, or an incomplete set"""


def build_app(words: Sequence[str]) -> typer.Typer:
    """The command line for these words. Commands import much, so only the one that is called is imported."""
    names = {"help_option_names": ["-h", "--help"]}
    app = commandline.make_app(help=HELP, epilog=EPILOG, rich_markup_mode=None, context_settings=names)
    for name, question in COMMANDS.items():
        if name in words[:1]:
            package = "steptime" if name in SHARED else "bench"
            importlib.import_module(f"{package}.commands.{name.replace('-', '_')}").register(app)
        else:
            app.command(name, help=question)(lambda: None)
    return app


def call(words: Sequence[str]) -> int:
    """Run one command; its exit code.

    Raises:
        UserError: a mistake of the user.
    """
    if list(words) == ["syncs"]:
        words = ["syncs", "--help"]
    return commandline.call(build_app(words), words, PROGRAM)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. A mistake of the user is one line on stderr and code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return call(sys.argv[1:] if arguments is None else arguments)
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
