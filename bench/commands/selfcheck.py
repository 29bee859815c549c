"""`python -m bench selfcheck`: how often is the harness itself wrong?

Three questions with known answers: identical code (every `over` is a false alarm), code slowed by a known 1,
2 and 5%, and planted bad collectors. Gates of two processes are measured and judged by the very code that
judges commits. What is left of the time goes round and round, every other gate to identical code; its
segments are also judged with head's times scaled, which asks about a known cost in the same noise for free.
Every rate is printed with its exact (Clopper-Pearson) 95% bounds, so a short check says less, and nothing
else. The gates are kept in the folder: a second check into it goes on from there, and checks of several
folders can be added up."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from bench import arguments, files
from bench.arguments import option, to_minutes, to_names, to_percents
from bench.gate.session import gather
from bench.gate.verdict import Options
from bench.gate.worktrees import Tree
from bench.machine import identity
from bench.machine.commit import ROOT, read_commit
from bench.measure.runner import INTERRUPTED
from bench.progress import Reporter, human_time
from bench.selfcheck import rates, stored_gates
from bench.selfcheck.plant_check import check_plants
from bench.selfcheck.rates import RateRow, Report
from bench.selfcheck.stored_gates import Trial
from bench.selfcheck.tables import to_json, to_markdown, to_text
from dflash.config import Config, load_config
from steptime.errors import UserError

MINUTES = 20.0
COSTS = (1.0, 2.0, 5.0)
"""Percent of the throughput that head loses, unless the caller asks for other ones."""
GATE_MINUTES = 1.5
PLANT_SHARE = 0.4
"""Share of the time that planted faults may take."""
GATES = "gates.jsonl"
INJECT_HELP = """\
real slowdowns to find, a gate of identical code before each (default 1,2,5);
with a 0 in it just these, in turn"""


def register(app: typer.Typer) -> None:
    """Add the command. Further words are files of `--again`, since an option takes one word here."""
    app.command("selfcheck", context_settings={"allow_extra_args": True})(selfcheck)


def selfcheck(
    context: typer.Context,
    config: arguments.Config = arguments.CONFIG,
    settings: arguments.Settings = None,
    seed: arguments.Seed = 0,
    out: arguments.Out = None,
    minutes: Annotated[float, option("--minutes M", "time in all (default 20)", to_minutes)] = MINUTES,
    gate_minutes: Annotated[
        float,
        option("--gate-minutes M", "time of each gate (default 1.5)", to_minutes),
    ] = GATE_MINUTES,
    subjects: Annotated[
        tuple,
        option("--subjects S,...", "spin, trainer or both (default spin)", to_names),
    ] = ("spin",),
    inject: Annotated[tuple, option("--inject PERCENT,...", INJECT_HELP, to_percents)] = COSTS,
    no_plants: Annotated[bool, option("--no-plants", "leave the planted faults out: gates only")] = False,
    again: Annotated[
        list[Path] | None,
        option("--again FILE...", "judge the gates.jsonl of earlier checks; measure nothing"),
    ] = None,
) -> int:
    """How often is the harness wrong?
    Identical code, known slowdowns, planted faults; rates with exact bounds.
    """
    from bench.subjects.registry import SUBJECTS  # heavy: torch

    if again:
        return judge_again([*again, *map(Path, context.args)], out, Reporter())
    if context.args:
        raise UserError(f"unexpected word {context.args[0]!r}: files belong to --again")
    for name in subjects:
        SUBJECTS[name]  # an unknown one is refused before anything is measured
    return run_selfcheck(
        load_config(config, settings or ()),
        config_path=config,
        settings=settings or (),
        minutes=minutes,
        subjects=subjects,
        gate_minutes=gate_minutes,
        out=out,
        reporter=Reporter(),
        seed=seed,
        injected=inject,
        plants=not no_plants,
    )


def machine_in_words() -> str:
    this = identity.identify()
    return ", ".join([this.cpu_model, f"{this.cpus} cores", *(model for model, _ in this.gpus)])


def run_selfcheck(
    config: Config,
    *,
    config_path: str,
    settings: Sequence[str] = (),
    minutes: float,
    subjects: Sequence[str],
    gate_minutes: float,
    out: str | None,
    reporter: Reporter,
    seed: int = 0,
    injected: Sequence[float] = COSTS,
    plants: bool = True,
) -> int:
    """Check until the time is up, print the table, write selfcheck.json and selfcheck.md. Returns the exit
    code:

    0 when nothing was wrong; 1 when a planted fault was missed, identical code was called `over`, or a real
    loss of twice the budget or more `within`; 5 when it was interrupted, or something was not tried."""
    folder = files.choose_folder(out, "selfcheck")
    started = time.monotonic()
    earlier = list(stored_gates.read(folder / GATES)) if (folder / GATES).exists() else []
    if earlier:
        reporter.say(f"selfcheck: {len(earlier)} gates are in {folder} already; these are added to them")
    report = make_report(earlier, rates.make_rows(subjects, gate_minutes, injected))
    before_s, end = report.seconds, started + 60.0 * minutes
    judged: set[str] = set()

    def keep(trial: Trial) -> None:
        if rates.add(report, trial):
            judged.add(trial.subject)
        stored_gates.append(folder / GATES, trial)
        report.seconds = before_s + round(time.monotonic() - started, 1)
        _write(folder, report)

    try:
        if plants:
            report.plants = check_plants(
                config, config_path, settings, started + PLANT_SHARE * 60.0 * minutes, reporter
            )
        _check_gates(config, rates.turns(subjects, injected), gate_minutes, end, seed, reporter, keep)
    except KeyboardInterrupt:
        report.untried.append("interrupted; what was measured so far counts")
    # Gates of earlier checks are no excuse for one that measured nothing.
    report.untried += [
        f"no gate of {subject} was measured and judged" for subject in subjects if subject not in judged
    ]
    report.seconds = before_s + round(time.monotonic() - started, 1)
    _write(folder, report)
    print(to_text(report))
    files.post_summary(to_markdown(report))
    reporter.say(f"{folder}/selfcheck.json, selfcheck.md, {GATES}")
    return int(rates.exit_code(report))


def _check_gates(
    config: Config,
    order: Iterable[tuple[str, float]],
    gate_minutes: float,
    end: float,
    seed: int,
    reporter: Reporter,
    keep: Callable[[Trial], None],
) -> None:
    """One gate of each kind in turn, as long as another one fits."""
    longest = 60.0 * gate_minutes
    for number, (subject, percent) in enumerate(order):
        left = end - time.monotonic()
        if left < longest:
            return
        reporter.say(
            f"selfcheck: gate {number + 1}, {subject}, {percent:g}% injected; {human_time(left)} left"
        )
        began = time.monotonic()
        trial = try_gate(config, subject, percent, gate_minutes, seed + number)
        longest = max(longest, time.monotonic() - began)
        keep(trial)


def try_gate(config: Config, subject: str, inject_percent: float, minutes: float, seed: int) -> Trial:
    """One gate of this tree against itself, head slowed by a known share."""
    from bench.subjects.registry import SUBJECTS  # heavy: torch

    kind = SUBJECTS[subject]
    options = Options(
        base="HEAD",
        config=config,
        minutes=minutes,
        seed=seed,
        kind=kind,
        inject_percent=inject_percent,
        launches=kind.gate_launches,
    )
    commit = read_commit()
    base, head = (Tree(name, commit, ROOT, sys.executable) for name in ("base", "head"))
    evidence = gather(options, base, head, Reporter(quiet=True), compare=False)
    if evidence.stopped == INTERRUPTED:
        raise KeyboardInterrupt
    return Trial(
        subject=subject,
        inject_percent=inject_percent,
        minutes=minutes,
        seed=seed,
        machine=machine_in_words(),
        commit=(commit.id[:10] or "unknown") + ("+changes" if commit.dirty else ""),
        cycle=evidence.cycle,
        segments=tuple(evidence.segments),
        incomplete=tuple(evidence.incomplete),
        not_comparable=tuple(evidence.not_comparable),
        before=evidence.before,
        after=evidence.after,
    )


def judge_again(gates: Sequence[Path], out: str | None, reporter: Reporter) -> int:
    """The tables of gates that earlier checks kept, added up; nothing is measured. Exit codes as of
    `run_selfcheck`.

    Raises:
        UserError: a file that holds no gates.
    """
    stored = [trial for file in gates for trial in stored_gates.read(file)]
    if not stored:
        raise UserError(f"{', '.join(map(str, gates))}: no gate in it")
    report = make_report(stored)
    _write(files.choose_folder(out, "selfcheck"), report)
    print(to_text(report))
    return int(rates.exit_code(report))


def make_report(stored: Sequence[Trial], rows: Sequence[RateRow] = ()) -> Report:
    """What stored gates come to, with room for those of `rows`; `seconds` are what the gates were given."""
    kinds = {row.kind for row in rows}
    report = Report([*rows, *(row for row in rates.rows_of(stored) if row.kind not in kinds)])
    for trial in stored:
        rates.add(report, trial)
    report.seconds = sum(60.0 * trial.minutes for trial in stored)
    return report


def _write(folder: Path, report: Report) -> None:
    files.write(folder / "selfcheck.json", to_json(report))
    files.write(folder / "selfcheck.md", to_markdown(report))
