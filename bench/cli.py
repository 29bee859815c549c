"""`python -m bench overhead | gate | baseline | selfcheck | syncs | gpu-check`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from steptime import cli, commandline
from steptime.subjects import registry

PROGRAM = "python -m bench"
OURS = ("selfcheck", "gpu-check")
"""The others are `steptime`'s: they serve any trainer."""
COMMANDS = {
    "overhead": "what does each collector cost?",
    "gate": "is this commit slower than that one?",
    "baseline": "are we drifting from the stored figure?",
    "selfcheck": "how often is the harness wrong?",
    "syncs": "count the host syncs of any PyTorch program",
    "gpu-check": "day one on a GPU: is everything as claimed there?",
}
HELP = "Measures what the trainer's metrics cost, and whether one commit is slower than another."


def build_app(words: Sequence[str]) -> typer.Typer:
    """The command line for these words."""
    return cli.build_app(words, COMMANDS, lambda name: "bench" if name in OURS else "steptime", HELP)


def call(words: Sequence[str]) -> int:
    """Run one command; its exit code.

    Raises:
        UserError: a mistake of the user.
    """
    registry.PROVIDERS[:] = ["bench.subjects.registry"]
    if list(words) == ["syncs"]:
        words = ["syncs", "--help"]
    return commandline.call(build_app(words), words, PROGRAM)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. A mistake of the user is one line on stderr and code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    words = sys.argv[1:] if arguments is None else arguments
    return cli.guarded(lambda: call(words))
