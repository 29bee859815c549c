"""`python -m bench selfcheck`: how often is the harness itself wrong?

Three questions with known answers: nothing that costs (every `over` is a false alarm), a known 1, 2 and 5%,
and planted bad collectors. Gates of two processes, and runs of `overhead` cut from sessions of one subject,
are measured and judged by the very code that judges commits and collectors. What is left of the time goes
round and round, every other turn without a cost; its pairs are also judged with one switch's times scaled,
which asks about a known cost in the same noise for free. Every rate is printed with its exact
(Clopper-Pearson) 95% bounds, so a short check says less, and nothing else. The runs are kept in the folder: a
second check into it goes on from there, and checks of several folders can be added up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from bench.selfcheck import rates, trials
from bench.selfcheck.plant_check import check_plants
from bench.selfcheck.rates import RateRow, Report
from bench.selfcheck.tables import to_json, to_markdown, to_text
from bench.selfcheck.taking import take
from bench.selfcheck.trials import Command, Trial
from dflash.config import Config, load_config
from steptime import arguments, run_files
from steptime.arguments import option, to_minutes, to_names
from steptime.commands.overhead import MINUTES as OVERHEAD_MINUTES
from steptime.commands.overhead import QUICK_MINUTES
from steptime.errors import UserError, nearest
from steptime.progress import Reporter, human_time
from steptime.subjects.injection import parse_injection

MINUTES = 20.0
COSTS = ("1@step", "2@step", "5@step")
"""Known costs, unless the caller asks for other ones."""
GATE_MINUTES = 1.5
PLANT_SHARE = 0.4
"""Share of the time that planted faults may take."""
SESSION_S = 120.0
"""A session of `overhead` gives one run, and as many more as fit into this time: most are clear early."""
TRIALS = "trials.jsonl"
INJECT_HELP = """\
known costs to find, PERCENT[@PLACE] each, a run without one before each
(default 1,2,5); with a 0 in it just these, in turn"""


def to_injects(text: str) -> tuple[str, ...]:
    """`0,2@tick` as `("", "2@tick")`. Raises UserError."""
    found = [parse_injection(part.strip()) for part in text.split(",")]
    return tuple(f"{one.percent:g}@{one.place}" if one.percent else "" for one in found)


def to_commands(text: str) -> tuple[Command, ...]:
    """Comma-separated names."""
    known = [command.value for command in Command]
    for name in to_names(text):
        if name not in known:
            raise typer.BadParameter(f"no such command {name!r}{nearest(name, known)}: gate, overhead")
    return tuple(Command(name) for name in to_names(text))


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
    commands: Annotated[
        tuple,
        option("--commands C,...", "gate, overhead or both (default both)", to_commands),
    ] = tuple(Command),
    gate_minutes: Annotated[
        float,
        option("--gate-minutes M", "time of each gate (default 1.5)", to_minutes),
    ] = GATE_MINUTES,
    overhead_minutes: Annotated[
        float,
        option("--overhead-minutes M", "most time of each run of overhead (default 8)", to_minutes),
    ] = OVERHEAD_MINUTES,
    quick: Annotated[bool, option("--quick", "runs of overhead as short as its own --quick")] = False,
    subjects: Annotated[
        tuple,
        option("--subjects S,...", "spin, trainer or both (default spin)", to_names),
    ] = ("spin",),
    inject: Annotated[tuple, option("--inject PERCENT,...", INJECT_HELP, to_injects)] = COSTS,
    no_plants: Annotated[bool, option("--no-plants", "leave the planted faults out")] = False,
    again: Annotated[
        list[Path] | None,
        option("--again FILE...", "judge the trials.jsonl of earlier checks; measure nothing"),
    ] = None,
) -> int:
    """How often is the harness wrong?
    Nothing that costs, known costs, planted faults; rates with exact bounds.
    """
    from bench.subjects.registry import SUBJECTS  # heavy: torch

    if again:
        return judge_again([*again, *map(Path, context.args)], out)
    if context.args:
        raise UserError(f"unexpected word {context.args[0]!r}: files belong to --again")
    for name in subjects:
        SUBJECTS[name]  # an unknown one is refused before anything is measured
    each = {Command.GATE: gate_minutes, Command.OVERHEAD: QUICK_MINUTES if quick else overhead_minutes}
    return run_selfcheck(
        load_config(config, settings or ()),
        config_path=config or arguments.CONFIG,
        settings=settings or (),
        minutes=minutes,
        subjects=subjects,
        run_minutes={command: each[command] for command in commands},
        out=out,
        reporter=Reporter(),
        seed=seed,
        injected=inject,
        plants=not no_plants,
    )


def run_selfcheck(
    config: Config,
    *,
    config_path: str,
    settings: Sequence[str] = (),
    minutes: float,
    subjects: Sequence[str],
    run_minutes: dict[Command, float],
    out: str | None,
    reporter: Reporter,
    seed: int = 0,
    injected: Sequence[str] = COSTS,
    plants: bool = True,
) -> int:
    """Check until the time is up, print the table, write selfcheck.json and selfcheck.md.

    Args:
        run_minutes: time of each run, by the commands that are checked.

    Returns:
        The exit code: 0 when nothing was wrong; 1 when a planted fault was missed, or what costs nothing was
        called `over`, or a real loss of twice the budget `within`, more often than chance has it; 5 when it
        was interrupted, or something was not tried.
    """
    folder = run_files.choose_folder(out, "selfcheck")
    started = time.monotonic()
    earlier = list(trials.read(folder / TRIALS)) if (folder / TRIALS).exists() else []
    if earlier:
        reporter.say(f"selfcheck: {len(earlier)} runs are in {folder} already; these are added to them")
    rows = [
        row
        for command, each in run_minutes.items()
        for subject in subjects
        for row in rates.make_rows(command, subject, each, injected)
    ]
    report = make_report(earlier, rows)
    before_s, end = report.seconds, started + 60.0 * minutes
    judged: set[tuple[Command, str]] = set()

    def keep(trial: Trial) -> None:
        if rates.add(report, trial):
            judged.add((trial.command, trial.subject))
        trials.append(folder / TRIALS, trial)
        report.seconds = before_s + round(time.monotonic() - started, 1)
        _write(folder, report)

    try:
        if plants:
            report.plants = check_plants(
                config, config_path, settings, started + PLANT_SHARE * 60.0 * minutes, reporter
            )
        _check_runs(config, subjects, injected, run_minutes, end, seed, reporter, keep)
    except KeyboardInterrupt:
        report.untried.append("interrupted; what was measured so far counts")
    # Runs of earlier checks are no excuse for one that measured nothing.
    report.untried += [
        f"no {'gate' if command is Command.GATE else 'run of overhead'} of {subject} was measured and judged"
        for command in run_minutes
        for subject in subjects
        if (command, subject) not in judged
    ]
    report.seconds = before_s + round(time.monotonic() - started, 1)
    _write(folder, report)
    print(to_text(report))
    run_files.post_summary(to_markdown(report))
    reporter.say(f"{folder}/selfcheck.json, selfcheck.md, {TRIALS}")
    return int(rates.exit_code(report))


def _check_runs(
    config: Config,
    subjects: Sequence[str],
    injected: Sequence[str],
    run_minutes: dict[Command, float],
    end: float,
    seed: int,
    reporter: Reporter,
    keep: Callable[[Trial], None],
) -> None:
    """A gate, or a session of `overhead`, of each kind in turn, as long as another one fits."""
    needed = {command: 60.0 * each for command, each in run_minutes.items()}
    for number, (command, subject, inject) in enumerate(rates.turns(list(needed), subjects, injected)):
        left = end - time.monotonic()
        if left < min(needed.values()):
            return
        if left < needed[command]:
            continue
        reporter.say(
            f"selfcheck: {command} of {subject}, {inject or 'nothing'} injected; {human_time(left)} left"
        )
        began, taken_s = time.monotonic(), 0.0
        session_s = min(SESSION_S, left)
        for trial in take(command, subject, config, inject, run_minutes[command], seed + number, session_s):
            keep(trial)
            taken_s += 60.0 * trial.minutes_taken
        # What comes on top of the runs, building above all, is known from now on.
        over_s = max(0.0, time.monotonic() - began - taken_s)
        needed[command] = max(needed[command], 60.0 * run_minutes[command] + over_s)


def judge_again(stored: Sequence[Path], out: str | None) -> int:
    """The tables of runs that earlier checks kept, added up; nothing is measured. Exit codes as of
    `run_selfcheck`.

    Raises:
        UserError: a file that holds no runs.
    """
    found = [trial for file in stored for trial in trials.read(file)]
    if not found:
        raise UserError(f"{', '.join(map(str, stored))}: no run in it")
    report = make_report(found)
    _write(run_files.choose_folder(out, "selfcheck"), report)
    print(to_text(report))
    return int(rates.exit_code(report))


def make_report(stored: Sequence[Trial], rows: Sequence[RateRow] = ()) -> Report:
    """What stored runs come to, with room for those of `rows`; `seconds` are what their pairs took."""
    kinds = {row.kind for row in rows}
    report = Report([*rows, *(row for row in rates.rows_of(stored) if row.kind not in kinds)])
    for trial in stored:
        rates.add(report, trial)
    report.seconds = round(sum(60.0 * trial.minutes_taken for trial in stored), 1)
    return report


def _write(folder: Path, report: Report) -> None:
    run_files.write(folder / "selfcheck.json", to_json(report))
    run_files.write(folder / "selfcheck.md", to_markdown(report))
