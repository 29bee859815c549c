"""`python -m bench gate --base REF`: is this commit slower than that one, on this machine, now?"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from bench import arguments, files
from bench.arguments import option, to_budget, to_minutes, to_natural, to_percent
from bench.gate.session import gather
from bench.gate.verdict import MINUTES, GateEvidence, Options, make_receipt
from bench.gate.worktrees import NoHarness, checked_out
from bench.machine.commit import read_commit
from bench.progress import Reporter
from bench.records.receipt import Receipt
from bench.records.types import Commit
from bench.report.files import write_all
from bench.report.show import show
from dflash.config import load_config


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("gate")(gate)


def gate(
    base: Annotated[str, option("--base REF", "commit to compare with, e.g. origin/main or HEAD^1")],
    config: arguments.Config = arguments.CONFIG,
    settings: arguments.Settings = None,
    seed: arguments.Seed = 0,
    out: arguments.Out = None,
    minutes: Annotated[float, option("--minutes M", "time for measuring (default 10)", to_minutes)] = MINUTES,
    budget: Annotated[float, option("--budget PERCENT", "slowdown allowed (default 1%)", to_budget)] = 1.0,
    inject: Annotated[
        float,
        option("--inject PERCENT", "slow head by a known share, to see it found", to_percent),
    ] = 0.0,
    launches: Annotated[
        int | None,
        option("--launches N", "pairs of processes (default 3 to 10, by the time)", to_natural),
    ] = None,
    subject: arguments.Subject = "trainer",
) -> int:
    """Is this commit slower than that one, on this machine, now? Two persistent worker processes take
    turns."""
    from bench.subjects.registry import SUBJECTS  # heavy: torch

    options = Options(
        base=base,
        config=load_config(config, settings or ()),
        minutes=minutes,
        budget_percent=budget,
        seed=seed,
        out=out,
        kind=SUBJECTS[subject],
        inject_percent=inject,
        launches=launches or None,
    )
    return int(run_gate(options, Reporter()).exit_code)


def run_gate(options: Options, reporter: Reporter, root: Path | None = None) -> Receipt:
    """Measure both commits, judge, write the three files, print the report.

    Raises:
        UserError: no such base, or a config that is wrong.
    """
    folder = files.choose_folder(options.out, "gate")
    places = {} if root is None else {"root": root}
    started = time.monotonic()
    try:
        with checked_out(options.base, reporter.say, **places) as (base, head):
            evidence = gather(options, base, head, reporter)
            receipt = make_receipt(options, evidence, base.commit, head.commit, time.monotonic() - started)
            if head.commit.dirty and read_commit(head.root) != head.commit:
                evidence.incomplete.append("the uncommitted changes changed while they were measured")
                receipt = make_receipt(
                    options, evidence, base.commit, head.commit, time.monotonic() - started
                )
    except NoHarness as error:
        evidence = GateEvidence(incomplete=[str(error)])
        receipt = make_receipt(
            options, evidence, Commit(""), read_commit(**places), time.monotonic() - started
        )
    write_all(receipt, folder)
    show(receipt, folder)
    return receipt
