"""`gate --base REF`: is this commit slower than that one, on this machine, now?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from steptime import arguments, run_files
from steptime.arguments import option, to_budget, to_minutes, to_natural
from steptime.errors import UserError
from steptime.gate import anywhere
from steptime.gate.accept import Accepted, parse_text
from steptime.gate.session import gather
from steptime.gate.verdict import COMPARED_STEPS, MINUTES, GateEvidence, Options, make_receipt
from steptime.gate.worktrees import NoHarness, checked_out
from steptime.machine.commit import read_commit
from steptime.progress import Reporter
from steptime.records.receipt import Receipt
from steptime.records.types import Commit
from steptime.report.files import write_all
from steptime.report.show import show
from steptime.statistics.intended import Allowance, Numerics, parse_allowance
from steptime.subjects.injection import parse_injection
from steptime.subjects.steps.kind import LoopKind


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("gate", context_settings={"allow_extra_args": True})(gate)


def gate(
    context: typer.Context,
    base: Annotated[str, option("--base REF", "commit to compare with, e.g. origin/main or HEAD^1")],
    config: arguments.Config = None,
    settings: arguments.Settings = None,
    seed: arguments.Seed = 0,
    out: arguments.Out = None,
    minutes: Annotated[float, option("--minutes M", "time for measuring (default 10)", to_minutes)] = MINUTES,
    budget: Annotated[float, option("--budget PERCENT", "slowdown allowed (default 1%)", to_budget)] = 1.0,
    inject: Annotated[
        str,
        option("--inject PERCENT[@PLACE]", "slow head by a known cost, to see it found"),
    ] = "",
    launches: Annotated[
        int | None,
        option("--launches N", "pairs of processes (default 7 to 12, by the time)", to_natural),
    ] = None,
    numerics: Annotated[
        Numerics,
        option("--numerics MODE", "same: losses equal bit for bit; close: within 0.1%; changed: any"),
    ] = Numerics.SAME,
    allow_count: Annotated[
        list[str] | None,
        option("--allow-count 'KIND: ROLE PLACE +N'", "let this exact count rise; needs --reason"),
    ] = None,
    reason: Annotated[str, option("--reason TEXT", "why; stands in the receipt and in the report")] = "",
    compare_steps: Annotated[
        int,
        option("--compare-steps N", "training steps compared first (default 12)", to_natural),
    ] = COMPARED_STEPS,
    accept_from: Annotated[
        Path | None,
        option("--accept-from FILE", "a pull request's text; its lines `Bench-Accept: ...` are allowances"),
    ] = None,
    subject: arguments.Subject = None,
    hf: arguments.Hf = False,
    lightning: arguments.Lightning = False,
    install: Annotated[
        str,
        option("--install CMD", "makes the environment of each side of a trainer of yours, in its worktree"),
    ] = "",
    head_subject: Annotated[
        bool, option("--head-subject", "head's subject file or script over base's code")
    ] = False,
) -> int:
    """Is this commit slower than that one, on this machine, now? Two persistent worker processes take
    turns."""
    from steptime.subjects.registry import find  # heavy: torch

    arguments.one_process()
    parsed = parse_injection(inject or "0")
    allowances = _allowances(allow_count or (), reason)
    if numerics is Numerics.CHANGED and not reason:
        raise UserError("--numerics changed: say why with --reason")
    accepted = _accepted(accept_from)
    if accepted.numerics is not Numerics.SAME and numerics is not Numerics.SAME:
        raise UserError("--numerics and the text of --accept-from both say how losses are compared")
    kind = find(arguments.framework(context, hf, lightning) or subject, context.args)
    options = Options(
        base=base,
        config=kind.settings(config, settings or ()),
        minutes=minutes,
        budget_percent=budget,
        seed=seed,
        out=out,
        kind=kind,
        inject=inject and f"{parsed.percent:g}@{parsed.place}",
        launches=launches or None,
        numerics=numerics if accepted.numerics is Numerics.SAME else accepted.numerics,
        numerics_reason=reason or accepted.reason,
        compare_steps=max(1, compare_steps),
        allowances=(*allowances, *accepted.allowances),
        install=install,
        head_subject=head_subject,
    )
    return int(run_gate(options, Reporter()).exit_code)


def _accepted(path: Path | None) -> Accepted:
    if path is None:
        return Accepted()
    try:
        return parse_text(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--accept-from {path}: {getattr(error, 'strerror', None) or error}") from None


def _allowances(texts: Sequence[str], reason: str) -> tuple[Allowance, ...]:
    if texts and not reason:
        raise UserError("--allow-count: say why with --reason")
    return tuple(parse_allowance(text, reason) for text in texts)


def run_gate(options: Options, reporter: Reporter, root: Path | None = None) -> Receipt:
    """Measure both commits, judge, write the three files, print the report.

    Raises:
        UserError: no such base, or a config that is wrong.
    """
    folder = run_files.choose_folder(options.out, "gate").resolve()
    places = {} if root is None else {"root": root}
    checkout = checked_out(options.base, reporter.say, **places)
    if isinstance(options.kind, LoopKind):
        kind = options.kind.in_tree()
        options, places = replace(options, kind=kind, config=kind.settings(None, ())), {"root": kind.root}
        checkout = anywhere.checked_out(
            kind,
            options.base,
            reporter.say,
            install=options.install,
            head_subject=options.head_subject,
        )
    elif options.install or options.head_subject:
        raise UserError("--install and --head-subject need a --subject FILE, --hf or --lightning")
    started = time.monotonic()
    try:
        with checkout as (base, head):
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
