"""`python -m bench selfcheck`: how often is the harness itself wrong?

Three questions with known answers: identical code (every `over` is a false alarm), code slowed by a known 1, 2 and 5%, and
planted bad collectors. Gates of two processes are measured and judged by the very code that judges commits. What is left of
the time goes round and round, every other gate to identical code; its segments are also judged with head's times scaled, which
asks about a known cost in the same noise for free. Every rate is printed with its exact (Clopper-Pearson) 95% bounds, so a
short check says less, and nothing else. The gates are kept, so that several checks can be added up.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scipy.stats import binomtest
from tabulate import tabulate

from bench import machine, outputs, rivals, trials
from bench.code import ROOT, read_commit
from bench.gate import gather
from bench.gate_verdict import Evidence, Options, judge
from bench.measure import INTERRUPTED
from bench.plan import human_time
from bench.plant_check import PlantFound, check_plants
from bench.progress import Reporter
from bench.records import ExitCode, Verdict
from bench.trials import Trial
from bench.worktrees import Tree
from dflash.config import Config
from dflash.errors import UserError

MINUTES = 20.0
COSTS = (1.0, 2.0, 5.0)
"""Percent of the throughput that head loses: for real, unless the caller asks for other ones, and on paper."""
GATE_MINUTES = 1.5
LAUNCHES = {"spin": 8}
"""Launches of a gate, where building costs next to nothing; otherwise as many as the gate itself thinks fit."""
PLANT_SHARE = 0.4
"""Share of the time that planted faults may take."""
SCHEMA = "dflash-bench/selfcheck/2"
GATES = "gates.jsonl"


@dataclass(slots=True)
class Row:
    """Gates of one kind: how many, what they said, and what others would have said.

    Attributes:
        scaled: no gates of their own; those of identical code, with head's times scaled.
    """

    subject: str
    inject_percent: float
    scaled: bool = False
    runs: int = 0
    minutes: list[float] = field(default_factory=list)
    verdicts: dict[str, int] = field(default_factory=dict)
    widths: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    """Estimate less what was injected, percent, of each run."""
    rivals: dict[str, int] = field(default_factory=dict)

    def count(self, *verdicts: Verdict) -> int:
        return sum(self.verdicts.get(verdict.value, 0) for verdict in verdicts)

    @property
    def judged(self) -> int:
        """Runs that are no `invalid`: those say nothing, and block nothing wrongly."""
        return self.runs - self.count(Verdict.INVALID)

    @property
    def found(self) -> int:
        """Runs that call head slower, resolved against the budget or not: both are red."""
        return self.count(Verdict.OVER, Verdict.SLOWER)


@dataclass(slots=True)
class Report:
    """Everything that a self-check found."""

    rows: list[Row]
    plants: list[PlantFound]
    machine: str
    seconds: float = 0.0


def make_rows(subjects: Sequence[str], injected: Sequence[float] = COSTS) -> list[Row]:
    """Every kind of gate: of identical code, really slowed, slowed on paper."""
    rows = []
    for subject in subjects:
        rows += [Row(subject, percent) for percent in sorted({0.0, *injected})]
        rows += [Row(subject, percent, scaled=True) for percent in COSTS]
    return rows


def machine_in_words() -> str:
    this = machine.identify()
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
    """Check until the time is up, print the table, write selfcheck.json and selfcheck.md. Returns the exit code:

    0 when nothing was wrong, 1 when a planted fault was missed or an A/A gate said `over`, 5 when nothing was checked.
    """
    folder = outputs.choose_folder(out, "selfcheck")
    started = time.monotonic()
    report = Report(make_rows(subjects, injected), [], machine_in_words())
    end = started + 60.0 * minutes

    def keep(trial: Trial) -> None:
        trials.append(folder / GATES, trial)
        report.seconds = round(time.monotonic() - started, 1)
        _write(folder, report)

    try:
        if plants:
            report.plants = check_plants(config, config_path, settings, started + PLANT_SHARE * 60.0 * minutes, reporter)
        _check_gates(config, report, turns(subjects, injected), gate_minutes, end, seed, reporter, keep)
    except KeyboardInterrupt:
        reporter.say("selfcheck: interrupted; what was measured so far counts")
    report.seconds = round(time.monotonic() - started, 1)
    _write(folder, report)
    print(to_text(report))
    reporter.say(f"{folder}/selfcheck.json, selfcheck.md, {GATES}")
    return int(exit_code(report))


def exit_code(report: Report) -> ExitCode:
    """0: nothing wrong; 1: a miss or a false alarm; 5: not one gate and not one plant was tried."""
    if not report.plants and not any(row.judged for row in report.rows):
        return ExitCode.INCOMPLETE
    alarms = sum(row.count(Verdict.OVER) for row in report.rows if row.inject_percent == 0)
    return ExitCode.OVER if alarms or any(not plant.found for plant in report.plants) else ExitCode.WITHIN


def turns(subjects: Sequence[str], injected: Sequence[float] = COSTS) -> Iterator[tuple[str, float]]:
    """Endless (subject, slowdown): those of the list in its order if it holds a 0, else one of identical code before each."""
    alternating = [percent for cost in injected for percent in (0.0, cost)]
    order = injected if 0.0 in injected else alternating or [0.0]
    while True:
        for subject in subjects:
            for percent in order:
                yield subject, percent


def _check_gates(
    config: Config,
    report: Report,
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
        reporter.say(f"selfcheck: gate {number + 1}, {subject}, {percent:g}% injected; {human_time(left)} left")
        began = time.monotonic()
        trial = try_gate(config, subject, percent, gate_minutes, seed + number)
        longest = max(longest, time.monotonic() - began)
        add(report.rows, trial)
        keep(trial)


def try_gate(config: Config, subject: str, inject_percent: float, minutes: float, seed: int) -> Trial:
    """One gate of this tree against itself, head slowed by a known share."""
    options = Options(
        base="HEAD",
        config=config,
        minutes=minutes,
        seed=seed,
        subject=subject,
        inject_percent=inject_percent,
        launches=LAUNCHES.get(subject),
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
        cycle=evidence.cycle,
        segments=tuple(evidence.segments),
        incomplete=tuple(evidence.incomplete),
        not_comparable=tuple(evidence.not_comparable),
        before=evidence.before,
        after=evidence.after,
    )


def add(rows: Sequence[Row], trial: Trial) -> None:
    """Take one gate into its row, and one of identical code into the scaled rows too. Pure but for the rows."""
    evidence = trial.evidence()
    for row in rows:
        if row.subject == trial.subject and row.inject_percent == trial.inject_percent and not row.scaled:
            _count(row, trial, evidence)
        elif row.subject == trial.subject and row.scaled and trial.inject_percent == 0:
            _count(row, trial, trials.slowed(evidence, row.inject_percent))


def _count(row: Row, trial: Trial, evidence: Evidence) -> None:
    options = Options(base="HEAD", config=Config(), subject=trial.subject)
    verdict = judge(options, evidence, counts_required=False).verdict
    row.runs += 1
    row.minutes.append(trial.minutes)
    row.verdicts[verdict.value] = row.verdicts.get(verdict.value, 0) + 1
    found = evidence.interval()
    if found is not None:
        row.widths.append((found.high - found.low) / 2)
        row.errors.append(found.percent - row.inject_percent)
    if verdict is not Verdict.INVALID:
        for name, alarm in rivals.alarms(evidence.segments).items():
            row.rivals[name] = row.rivals.get(name, 0) + alarm


def judge_again(files: Sequence[Path], out: str | None, reporter: Reporter) -> int:
    """The tables of gates that earlier checks kept, added up; nothing is measured. Exit codes as of `run_selfcheck`.

    Raises:
        UserError: a file that holds no gates.
    """
    stored = [trial for file in files for trial in trials.read(file)]
    if not stored:
        raise UserError(f"{', '.join(map(str, files))}: no gate in it")
    injected = sorted({trial.inject_percent for trial in stored} - {0.0})
    rows = make_rows(sorted({trial.subject for trial in stored}), injected)
    report = Report(rows, [], "; ".join(sorted({trial.machine for trial in stored})))
    for trial in stored:
        add(report.rows, trial)
    report.seconds = round(sum(60.0 * trial.minutes for trial in stored), 1)
    _write(outputs.choose_folder(out, "selfcheck"), report)
    print(to_text(report))
    return int(exit_code(report))


def _write(folder: Path, report: Report) -> None:
    outputs.write(folder / "selfcheck.json", to_json(report))
    outputs.write(folder / "selfcheck.md", to_markdown(report))


# -- the tables -----------------------------------------------------------------------------------------------------------


def share(hits: int, runs: int) -> str:
    """`57 of 60 = 95.0% (86.1 to 99.0)`, exact 95% bounds; a dash for no runs."""
    if not runs:
        return "-"
    low, high = binomtest(hits, runs).proportion_ci(0.95, "exact")
    return f"{hits} of {runs} = {100 * hits / runs:.1f}% ({100 * low:.1f} to {100 * high:.1f})"


def gate_rows(report: Report) -> list[list[str]]:
    """Rows of the table of gates."""
    rows = []
    for row in report.rows:
        question = "false alarms (over)" if row.inject_percent == 0 else f"{_cost(row)} found"
        hits = row.count(Verdict.OVER) if row.inject_percent == 0 else row.found
        width = f"{sorted(row.widths)[len(row.widths) // 2]:.2f}%" if row.widths else "-"
        said = ", ".join(f"{count} {verdict}" for verdict, count in sorted(row.verdicts.items()))
        minutes = f"{sorted(row.minutes)[len(row.minutes) // 2]:g}" if row.minutes else "-"
        rows.append([row.subject, question, minutes, share(hits, row.judged), width, said or "-"])
    return rows


def _cost(row: Row) -> str:
    return f"{row.inject_percent:g}%" + (", scaled," if row.scaled else "")


def rival_rows(report: Report) -> list[list[str]]:
    """Rows of the table of other tools on the same data: alarms on identical code, misses of known slowdowns."""
    rows = []
    for row in report.rows:
        if row.judged:
            ours = row.found
            texts = [share(row.rivals.get(name, 0), row.judged) for name in rivals.RIVALS]
            rows.append([row.subject, _cost(row).rstrip(","), share(ours, row.judged), *texts])
    return rows


GATE_HEADERS = ["subject", "question", "minutes", "answer (95% bounds)", "half-width", "verdicts"]
RIVAL_HEADERS = ["subject", "injected", "ours: slower or over", *rivals.RIVALS]
PLANT_HEADERS = ["planted fault", "found", "by"]


def plant_rows(report: Report) -> list[list[str]]:
    """Rows of the table of planted faults."""
    return [[plant.name, "yes" if plant.found else "NO", plant.how] for plant in report.plants]


def _tables(report: Report) -> list[tuple[str, list[list[str]], list[str]]]:
    return [
        ("Gates of this code against itself", gate_rows(report), GATE_HEADERS),
        ("Slower, says whom, on the same segments taken base first", rival_rows(report), RIVAL_HEADERS),
        ("Planted faults", plant_rows(report), PLANT_HEADERS),
    ]


def to_text(report: Report) -> str:
    """The tables for a terminal."""
    found = [(title, tabulate(rows, headers, disable_numparse=True)) for title, rows, headers in _tables(report) if rows]
    parts = [f"{title}\n{table}" for title, table in found]
    return "\n\n".join([*parts, f"on {report.machine}, in {human_time(report.seconds)}"])


def to_markdown(report: Report) -> str:
    """The tables as Markdown."""
    parts = ["# Self-check of the harness", f"{report.machine}; {human_time(report.seconds)}."]
    for title, rows, headers in _tables(report):
        if rows:
            parts += [f"## {title}", tabulate(rows, headers, tablefmt="github", disable_numparse=True)]
    return "\n\n".join(parts) + "\n"


def to_json(report: Report) -> str:
    """Everything, for later sums over several self-checks."""
    return json.dumps({"schema": SCHEMA, **dataclasses.asdict(report)}, indent=1) + "\n"
