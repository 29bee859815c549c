"""Runs the stages one after the other, each within its time, and keeps what each found as it ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tabulate import tabulate

from bench.gpu_check.stage import OUTCOME, Outcome, Stage, answer_path, door_of, judge, not_run
from steptime.child_process import run_python
from steptime.progress import human_time
from steptime.run_files import write

LIMIT_S = 600
"""All stages together; a test holds the sum of their shares to it."""


def run_stages(stages: Sequence[Stage], folder: Path, say: Callable[[str], None]) -> Iterator[list[Outcome]]:
    """Run each stage; after each, what is known of all of them. `folder` then holds `<stage>.json`."""
    outcomes = [not_run(stage) for stage in stages]
    for stage in stages:
        (folder / f"{stage.name}.json").unlink(missing_ok=True)
    for place, stage in enumerate(stages):
        say(f"{place + 1} of {len(stages)}  {stage.name}: at most {human_time(stage.seconds)}")
        outcomes[place] = run_stage(stage, folder)
        write(folder / f"{stage.name}.json", OUTCOME.dump_json(outcomes[place], indent=1).decode())
        for line in summary(outcomes[place]):
            say(line)
        yield list(outcomes)


def run_stage(stage: Stage, folder: Path) -> Outcome:
    """One stage in a child process."""
    answer = answer_path(folder, stage)
    answer.unlink(missing_ok=True)
    arguments = ["-m", "bench.gpu_check.child", door_of(stage), str(answer.resolve())]
    ended = run_python(arguments, limit_s=stage.seconds)
    (folder / f"{stage.name}.log").write_text(ended.out + ended.err, encoding="utf-8")
    try:
        content = answer.read_bytes()
    except OSError:
        return judge(stage, ended, None)
    answer.unlink()
    return judge(stage, ended, content)


def summary(outcome: Outcome) -> list[str]:
    """A stage's end, on the terminal."""
    found = outcome.found
    looked = f", {found.looked_at} {found.unit}" if found else ""
    first = f"    {'RED  ' if outcome.red else ''}{outcome.state} in {human_time(outcome.seconds)}{looked}"
    return [first, *(f"      - {line}" for line in outcome.problems)]


def plan_table(stages: Sequence[Stage]) -> str:
    """What would be run."""
    rows = [(stage.name, stage.asks, stage.seconds) for stage in stages]
    total = sum(stage.seconds for stage in stages)
    return tabulate(
        [*rows, ("all", "", total)],
        headers=("stage", "what it asks", "at most, s"),
        maxcolwidths=[None, 52, None],
    )


def say(line: str) -> None:
    """Progress, apart from what the command prints."""
    print(line, file=sys.stderr, flush=True)
