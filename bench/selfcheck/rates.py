"""Error rates of the harness, from runs whose truth is known: what was said of each kind. Pure.

A kind is a command, a subject, the minutes that its runs had, and the known cost that was in them. Runs
without a cost are judged a second time with one switch's times scaled: a known cost in real noise, for
free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from scipy.stats import binomtest

from bench.selfcheck import other_judges, trials
from bench.selfcheck.plant_check import PlantFound
from bench.selfcheck.trials import Command, Trial, true_percent
from steptime.gate.verdict import HEAD
from steptime.records.types import ExitCode, Verdict

SCALED = (1.0, 2.0, 5.0)
"""Percent of the throughput that is lost on paper."""
RED = (Verdict.OVER, Verdict.SLOWER)
MISS_PERCENT = 2.0
"""Really slowed by so much or more, twice the budget, and called `within`: a miss."""
ERROR_RATE = 0.01
"""Alarms and misses that a right harness may give, at most."""
SURE = 0.05


@dataclass(slots=True)
class RateRow:
    """Runs of one kind: how many, what they said, and what others would have said.

    Attributes:
        minutes: given to each run.
        inject: the known cost, `2@step`; empty: none.
        scaled: no runs of their own; those without a cost, with the times of one switch scaled.
        unblamed: `overhead`: runs that name another switch than the one that has the cost.
        held: runs whose interval holds the truth.
        widths: half-widths of the intervals.
        errors: estimate less the truth, percent, of each run.
    """

    command: Command
    subject: str
    minutes: float
    inject: str = ""
    scaled: bool = False
    runs: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    unblamed: int = 0
    held: int = 0
    widths: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    rivals: dict[str, int] = field(default_factory=dict)

    @property
    def kind(self) -> tuple[Command, str, float, str, bool]:
        return self.command, self.subject, self.minutes, self.inject, self.scaled

    def takes(self, trial: Trial) -> bool:
        own = self.kind[:3] == (trial.command, trial.subject, trial.minutes)
        return own and trial.inject == ("" if self.scaled else self.inject)

    def count(self, *verdicts: Verdict) -> int:
        return sum(self.verdicts.get(verdict.value, 0) for verdict in verdicts)

    @property
    def judged(self) -> int:
        """Runs that are no `invalid`: those say nothing, and block nothing wrongly."""
        return self.runs - self.count(Verdict.INVALID)

    @property
    def found(self) -> int:
        """Runs that call it slower, resolved against the budget or not: both are red."""
        return self.count(*RED)

    def add(self, trial: Trial) -> bool:
        """Judge a run and count what is said of it. Returns whether it was judged."""
        truth = true_percent(self.inject)
        run = trials.slowed(trial, truth) if self.scaled else trial
        said = run.judge()
        self.runs += 1
        self.verdicts[said.verdict.value] = self.verdicts.get(said.verdict.value, 0) + 1
        if said.verdict is Verdict.INVALID or said.all is None or said.all.estimate is None:
            return False
        found, dear = said.all.estimate, trial.dear if truth else ""
        self.widths.append((found.high - found.low) / 2)
        self.errors.append(found.percent - truth)
        self.held += found.low <= truth <= found.high
        self.unblamed += any(cost.verdict in RED and cost.name != dear for cost in said.collectors)
        if trial.command is Command.GATE:
            for name, alarm in other_judges.alarms(run.pairs, HEAD).items():
                self.rivals[name] = self.rivals.get(name, 0) + alarm
        return True


@dataclass(slots=True)
class Report:
    """Everything that a self-check found."""

    rows: list[RateRow]
    plants: list[PlantFound] = field(default_factory=list)
    machines: list[str] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)
    """Of the code that was measured, in the order met."""
    seconds: float = 0.0
    untried: list[str] = field(default_factory=list)
    """What was to be measured and was not, one line each."""


def make_rows(command: Command, subject: str, minutes: float, injected: Iterable[str]) -> list[RateRow]:
    """Every kind of run of one length: without a cost, with a real one, slowed on paper."""
    costs = sorted({"", *injected}, key=lambda text: (true_percent(text), text))
    rows = [RateRow(command, subject, minutes, inject) for inject in costs]
    return rows + [RateRow(command, subject, minutes, f"{percent:g}@step", scaled=True) for percent in SCALED]


def rows_of(stored: Sequence[Trial]) -> list[RateRow]:
    """The rows that stored runs have something for."""
    kinds: dict[tuple[Command, str, float], set[str]] = {}
    for trial in stored:
        kinds.setdefault((trial.command, trial.subject, trial.minutes), set()).add(trial.inject)
    made = [row for kind in sorted(kinds) for row in make_rows(*kind, kinds[kind])]
    return [row for row in made if ("" if row.scaled else row.inject) in kinds[row.kind[:3]]]


def add(report: Report, trial: Trial) -> bool:
    """Take one run into its row, one without a cost into the scaled rows too.

    Returns whether it was judged: one that is `invalid` says nothing.
    """
    judged = False
    for row in report.rows:
        if row.takes(trial):
            judged = row.add(trial) or judged
    for names, name in ((report.machines, trial.machine), (report.commits, trial.commit)):
        if name and name not in names:
            names.append(name)
    return judged


def too_often(hits: int, runs: int) -> bool:
    """More than a right harness gives once in twenty checks: 1 of 5, 2 of 35, 3 of 80."""
    return hits > 0 and float(binomtest(hits, runs, ERROR_RATE, "greater").pvalue) <= SURE


def exit_code(report: Report) -> ExitCode:
    """0: nothing wrong; 1: too many misses or false alarms; 5: not all that was to be tried was."""
    for command in Command:
        real = [row for row in report.rows if row.command is command and not row.scaled]
        free = [row for row in real if not row.inject]
        dear = [row for row in real if row.inject and true_percent(row.inject) >= 0.99 * MISS_PERCENT]
        alarms = sum(row.count(Verdict.OVER) for row in free), sum(row.judged for row in free)
        misses = sum(row.count(Verdict.WITHIN) for row in dear), sum(row.judged for row in dear)
        if too_often(*alarms) or too_often(*misses):
            return ExitCode.OVER
    if any(plant.found is False for plant in report.plants):
        return ExitCode.OVER
    untried = report.untried or any(plant.found is None for plant in report.plants)
    return ExitCode.INCOMPLETE if untried else ExitCode.WITHIN


def turns(
    commands: Sequence[Command], subjects: Sequence[str], injected: Sequence[str]
) -> Iterator[tuple[Command, str, str]]:
    """Endless (command, subject, cost): those of the list in its order if it holds none at all (""), else one
    without a cost before each."""
    alternating = [inject for cost in injected for inject in ("", cost)]
    order = injected if "" in injected else alternating or [""]
    while True:
        for inject in order:
            for command in commands:
                for subject in subjects:
                    yield command, subject, inject
