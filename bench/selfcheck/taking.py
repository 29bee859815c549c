"""Takes the trials of a self-check: gates of this tree against itself, and runs of `overhead` cut from
sessions of a resident subject."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from bench.selfcheck.trials import Command, Trial
from steptime.gate.session import gather
from steptime.gate.verdict import Options
from steptime.gate.worktrees import Tree
from steptime.machine import identity
from steptime.machine.commit import ROOT, read_commit
from steptime.measure.cuts import Cut, Cuts
from steptime.measure.run import INTERRUPTED, Asked, measure
from steptime.progress import Reporter
from steptime.records.pairs import PLACEBO
from steptime.statistics.judging import BUDGET_PERCENT
from steptime.subjects.injection import parse_injection
from steptime.subjects.pairs import PairSubject
from steptime.subjects.protocol import Settings


def take(
    command: Command,
    subject: str,
    settings: Settings,
    inject: str,
    minutes: float,
    seed: int,
    session_s: float,
) -> Iterator[Trial]:
    """One gate, or as many runs of `overhead` as fit into `session_s`. Raises KeyboardInterrupt after the
    trials that were whole by then."""
    from bench.subjects.registry import SUBJECTS  # heavy: torch

    if command is Command.GATE:
        yield take_gate(subject, settings, inject, minutes, seed)
        return
    injections = (parse_injection(inject),) if inject else ()
    made = SUBJECTS[subject].make_pairs(settings, injections=injections)
    yield from take_overhead(made, subject, inject, minutes, seed, session_s)


def take_gate(subject: str, settings: Settings, inject: str, minutes: float, seed: int) -> Trial:
    """One gate of this tree against itself, head slowed by a known cost."""
    from bench.subjects.registry import SUBJECTS  # heavy: torch

    kind = SUBJECTS[subject]
    options = Options(
        base="HEAD",
        config=settings,
        minutes=minutes,
        seed=seed,
        kind=kind,
        inject=inject,
        launches=kind.gate_launches,
    )
    commit = read_commit()
    base, head = (Tree(name, commit, ROOT, sys.executable) for name in ("base", "head"))
    evidence = gather(options, base, head, Reporter(quiet=True), compare=False)
    if evidence.stopped == INTERRUPTED:
        raise KeyboardInterrupt
    return Trial(
        command=Command.GATE,
        subject=subject,
        inject=inject,
        minutes=minutes,
        seed=seed,
        machine=machine_in_words(),
        commit=commit_in_words(),
        pairs=tuple(evidence.pairs),
        seconds_per=evidence.seconds_per,
        minutes_taken=evidence.minutes,
        incomplete=tuple(evidence.incomplete),
        not_comparable=tuple(evidence.not_comparable),
        before=evidence.before,
        after=evidence.after,
    )


def take_overhead(
    made: PairSubject, subject: str, inject: str, minutes: float, seed: int, session_s: float
) -> Iterator[Trial]:
    """Whole runs of one session, each ended by the rule that ends a run. What a crash left unfinished is a
    trial too, an incomplete one."""
    switches = tuple(name for name in made.switches if name != PLACEBO)
    cuts = Cuts(session_s, 60.0 * minutes)
    asked = Asked(switches, BUDGET_PERCENT, 60.0 * minutes, seed=seed)
    measured = measure(made, asked, Reporter(quiet=True), flushes=0, cuts=cuts)
    interrupted = measured.stopped == INTERRUPTED
    runs = list(cuts.runs)
    done = runs[-1].last if runs else 0
    if measured.faults and not interrupted:
        runs.append(Cut(done, len(measured.pairs), 0.0, measured.stopped))
    for number, run in enumerate(runs):
        yield Trial(
            command=Command.OVERHEAD,
            subject=subject,
            inject=inject,
            minutes=minutes,
            seed=seed + number,
            machine=machine_in_words(),
            commit=commit_in_words(),
            pairs=measured.pairs[run.first : run.last],
            seconds_per=measured.seconds_per,
            switches=switches,
            minutes_taken=run.minutes,
            incomplete=() if run in cuts.runs else measured.faults,
            not_comparable=(f"losses differ: {measured.difference}",) if measured.difference else (),
            before=measured.before,
            after=measured.after,
        )
    if interrupted:
        raise KeyboardInterrupt


def machine_in_words() -> str:
    """`Some CPU, 2 cores`."""
    this = identity.identify()
    return ", ".join([this.cpu_model, f"{this.cpus} cores", *(model for model, _ in this.gpus)])


def commit_in_words() -> str:
    """`82b8ebf123+changes`."""
    commit = read_commit()
    return (commit.id[:10] or "unknown") + ("+changes" if commit.dirty else "")
