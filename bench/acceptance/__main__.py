"""`python -m bench.acceptance` (`nox -s acceptance`): trains a target and a drafter for it, evaluates on
held-out prompts.

Every stage leaves its result in the run's folder, and the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from bench.acceptance.recipe import Recipe
from bench.cli import Parser
from dflash.data.prepare import Fields
from steptime.errors import UserError

EPILOG = """exit codes:
  0 the goal is reached and every prompt's text is the target's own    1 not    2 usage error"""


def parser() -> Parser:
    """The options."""
    found = Parser(
        prog="python -m bench.acceptance",
        description=(
            "Acceptance length before and after training, on held-out prompts; everything made here, on the "
            "CPU."
        ),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add(
        "--config",
        type=Path,
        default=Path("configs/acceptance.toml"),
        help="shape of the target, drafter, training",
    )
    add(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting over the file's",
    )
    add(
        "--data",
        type=Path,
        metavar="FILE",
        help="your own data to train on (default: the standard library's functions)",
    )
    add("--heldout", type=Path, metavar="FILE", help="your own data to evaluate on")
    add("--user", default="question", metavar="FIELD", help="the question's field, when it is no chat file")
    add("--assistant", default="answer", metavar="FIELD", help="the answer's field")
    add("--out", type=Path, metavar="DIR", help="run folder; finished stages there are kept")
    add("--quick", action="store_true", help="every stage in about a minute, without a goal")
    add("--target-tokens", type=int, metavar="N", help="tokens that the target is trained on")
    add(
        "--answers",
        type=int,
        metavar="N",
        help="conversations whose answers the target rewrites; 0 keeps the file's",
    )
    add("--answer-tokens", type=int, metavar="N", help="longest answer")
    add("--steps", type=int, metavar="N", help="steps of the drafter")
    add("--prompts", type=int, metavar="N", help="held-out prompts")
    add("--goal", type=float, metavar="TAU", help="acceptance length to reach")
    return found


def recipe_of(options: argparse.Namespace) -> Recipe:
    """The standard recipe with what was asked for."""
    recipe = Recipe().quick() if options.quick else Recipe()
    if options.target_tokens is not None:
        recipe = replace(recipe, target=replace(recipe.target, tokens=options.target_tokens))
    asked = {
        "answers": options.answers,
        "answer_tokens": options.answer_tokens,
        "steps": options.steps,
        "heldout": options.prompts,
        "goal": options.goal,
    }
    return replace(recipe, **{name: value for name, value in asked.items() if value is not None})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; returns the exit code."""
    from bench.acceptance.stages import AcceptanceRun

    try:
        options = parser().parse_args(arguments)
        folder = options.out or Path("runs") / f"acceptance-{time.strftime('%Y%m%d-%H%M%S')}"
        fields = Fields((options.user,), options.assistant)
        return AcceptanceRun(
            recipe_of(options),
            options.config,
            options.settings,
            folder,
            options.data,
            options.heldout,
            fields,
        ).all()
    except UserError as error:
        sys.stderr.write(f"bench.acceptance: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("bench.acceptance: interrupted; the same command with the same --out goes on\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
