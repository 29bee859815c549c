"""`python -m bench.acceptance` (`nox -s acceptance`): trains a target and a drafter for it, evaluates on
held-out prompts.

Every stage leaves its result in the run's folder, and the same command goes on where it stopped.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from bench.acceptance.recipe import Recipe
from dflash.data.prepare import Fields
from steptime import arguments
from steptime.arguments import option
from steptime.commandline import call, make_app
from steptime.errors import UserError

EPILOG = """\b
exit codes:
  0 the goal is reached and every prompt's text is the target's own
  1 not
  2 usage error"""


def build_app() -> typer.Typer:
    """The one command."""
    app = make_app(rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})
    app.command(epilog=EPILOG)(accept)
    return app


def accept(
    config: Annotated[
        str,
        option("--config FILE", "shape of the target, drafter, training (default configs/acceptance.toml)"),
    ] = "configs/acceptance.toml",
    settings: arguments.Settings = None,
    data: Annotated[
        Path | None,
        option("--data FILE", "your own data to train on (default: the standard library's functions)"),
    ] = None,
    heldout: Annotated[Path | None, option("--heldout FILE", "your own data to evaluate on")] = None,
    user: Annotated[str, option("--user FIELD", "the question's field, if it is no chat file")] = "question",
    assistant: Annotated[str, option("--assistant FIELD", "the answer's field")] = "answer",
    out: Annotated[Path | None, option("--out DIR", "run folder; finished stages there are kept")] = None,
    quick: Annotated[bool, option("--quick", "every stage in about a minute, without a goal")] = False,
    target_tokens: Annotated[
        int | None,
        option("--target-tokens N", "tokens that the target is trained on"),
    ] = None,
    answers: Annotated[
        int | None,
        option("--answers N", "conversations whose answers the target rewrites; 0 keeps the file's"),
    ] = None,
    answer_tokens: Annotated[int | None, option("--answer-tokens N", "longest answer")] = None,
    steps: Annotated[int | None, option("--steps N", "steps of the drafter")] = None,
    prompts: Annotated[int | None, option("--prompts N", "held-out prompts")] = None,
    goal: Annotated[float | None, option("--goal TAU", "acceptance length to reach")] = None,
) -> int:
    """Acceptance length before and after training, on held-out prompts; everything made here, on the CPU."""
    from bench.acceptance.stages import AcceptanceRun

    recipe = Recipe().quick() if quick else Recipe()
    if target_tokens is not None:
        recipe = replace(recipe, target=replace(recipe.target, tokens=target_tokens))
    asked: dict[str, Any] = {"answers": answers, "answer_tokens": answer_tokens, "steps": steps}
    asked |= {"heldout": prompts, "goal": goal}
    recipe = replace(recipe, **{name: value for name, value in asked.items() if value is not None})
    folder = out or Path("runs") / f"acceptance-{time.strftime('%Y%m%d-%H%M%S')}"
    return AcceptanceRun(
        recipe, Path(config), settings or [], folder, data, heldout, Fields((user,), assistant)
    ).all()


def main(words: Sequence[str] | None = None) -> int:
    """Run; returns the exit code."""
    try:
        return call(build_app(), sys.argv[1:] if words is None else words, "python -m bench.acceptance")
    except UserError as error:
        sys.stderr.write(f"bench.acceptance: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("bench.acceptance: interrupted; the same command with the same --out goes on\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
