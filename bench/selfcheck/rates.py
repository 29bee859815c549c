"""Error rates of the harness, from gates whose truth is known: what was said of each kind, and in what noise.
Pure.

A kind of gate is a subject, the minutes that its gates had, and the share of its throughput that head really
lost. Gates of identical code are judged a second time with head's times scaled: a known cost in real noise,
for free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.gate.verdict import BASE, HEAD, GateEvidence, Options, judge
from bench.records.types import ExitCode, Verdict
from bench.selfcheck import other_judges, stored_gates
from bench.selfcheck.plant_check import PlantFound
from bench.selfcheck.stored_gates import Trial
from bench.statistics.contrasts import Rounds, contrasts
from dflash.config import Config

SCALED = (1.0, 2.0, 5.0)
"""Percent of the throughput that head loses on paper."""


@dataclass(slots=True)
class RateRow:
    """Gates of one kind: how many, what they said, and what others would have said.

    Attributes:
        minutes: given to each gate.
        scaled: no gates of their own; those of identical code, with head's times scaled.
    """

    subject: str
    minutes: float
    inject_percent: float
    scaled: bool = False
    runs: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    widths: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    """Estimate less what was injected, percent, of each run."""
    rivals: dict[str, int] = field(default_factory=dict)

    @property
    def kind(self) -> tuple[str, float, float, bool]:
        return self.subject, self.minutes, self.inject_percent, self.scaled

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
class LaunchNoise:
    """How much head against base varies in gates of one length, whatever was injected, in log units.

    Attributes:
        within, within_df: sum of squares of rounds about the mean of their launch, and its degrees of
            freedom.
        between, between_df: the same of launches about the mean of their gate.
        expected: what the rounds alone let the squares of `between` come to.
    """

    subject: str
    minutes: float
    gates: int = 0
    rounds: int = 0
    launches: int = 0
    within: float = 0.0
    within_df: int = 0
    between: float = 0.0
    between_df: int = 0
    expected: float = 0.0

    def add(self, found: Rounds) -> None:
        """Take in the rounds of one gate; a launch of one round says nothing of spread and is left out."""
        groups = [
            group for p in np.unique(found.process) if len(group := found.plain[found.process == p]) > 1
        ]
        self.gates += 1
        self.launches += len(groups)
        self.rounds += sum(len(group) for group in groups)
        self.within += float(sum(((group - group.mean()) ** 2).sum() for group in groups))
        self.within_df += sum(len(group) - 1 for group in groups)
        if len(groups) > 1:
            means = np.array([group.mean() for group in groups])
            self.between += float(((means - means.mean()) ** 2).sum())
            self.between_df += len(groups) - 1
            by_rounds = np.mean([group.var(ddof=1) / len(group) for group in groups])
            self.expected += float(by_rounds) * (len(groups) - 1)

    @property
    def round_percent(self) -> float | None:
        """Standard deviation of a round about the mean of its launch."""
        return 100.0 * (self.within / self.within_df) ** 0.5 if self.within_df else None

    @property
    def launch_ratio(self) -> float | None:
        """Variance of launches over what their rounds account for: 1 where a launch adds no noise of its
        own."""
        return self.between / self.expected if self.expected > 0 else None


@dataclass(slots=True)
class Report:
    """Everything that a self-check found."""

    rows: list[RateRow]
    plants: list[PlantFound] = field(default_factory=list)
    noise: list[LaunchNoise] = field(default_factory=list)
    machines: list[str] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)
    """Of the code that was measured, in the order met."""
    seconds: float = 0.0
    untried: list[str] = field(default_factory=list)
    """What was to be measured and was not, one line each."""


def make_rows(subjects: Sequence[str], minutes: float, injected: Sequence[float]) -> list[RateRow]:
    """Every kind of gate of one length: of identical code, really slowed, slowed on paper."""
    rows = []
    for subject in subjects:
        rows += [RateRow(subject, minutes, percent) for percent in sorted({0.0, *injected})]
        rows += [RateRow(subject, minutes, percent, scaled=True) for percent in SCALED]
    return rows


def rows_of(stored: Iterable[Trial]) -> list[RateRow]:
    """The rows that stored gates have something for."""
    kinds: dict[tuple[str, float], set[float]] = {}
    for trial in stored:
        kinds.setdefault((trial.subject, trial.minutes), set()).add(trial.inject_percent)
    made = [
        row
        for (subject, minutes), costs in sorted(kinds.items())
        for row in make_rows([subject], minutes, sorted(costs))
    ]
    return [
        row for row in made if (0.0 if row.scaled else row.inject_percent) in kinds[row.subject, row.minutes]
    ]


def add(report: Report, trial: Trial) -> bool:
    """Take one gate into its row, one of identical code into the scaled rows too, and its rounds into the
    noise.

    Returns whether it was judged: one that is `invalid` says nothing.
    """
    evidence, judged = trial.evidence(), False
    for row in report.rows:
        if (row.subject, row.minutes) != (trial.subject, trial.minutes):
            continue
        if row.scaled and trial.inject_percent == 0:
            _count(row, stored_gates.slowed(evidence, row.inject_percent))
        elif not row.scaled and row.inject_percent == trial.inject_percent:
            judged = _count(row, evidence) is not Verdict.INVALID
    _noise_of(report, trial).add(contrasts(evidence.segments, (HEAD,), (BASE,), evidence.cycle))
    for names, name in ((report.machines, trial.machine), (report.commits, trial.commit)):
        if name and name not in names:
            names.append(name)
    return judged


def _noise_of(report: Report, trial: Trial) -> LaunchNoise:
    for noise in report.noise:
        if (noise.subject, noise.minutes) == (trial.subject, trial.minutes):
            return noise
    report.noise.append(LaunchNoise(trial.subject, trial.minutes))
    return report.noise[-1]


def _count(row: RateRow, evidence: GateEvidence) -> Verdict:
    from bench.subjects.registry import SUBJECTS  # heavy: torch

    options = Options(base="HEAD", config=Config(), kind=SUBJECTS[row.subject])
    verdict = judge(options, evidence, counts_required=False).verdict
    row.runs += 1
    row.verdicts[verdict.value] = row.verdicts.get(verdict.value, 0) + 1
    found = evidence.interval()
    if found is not None:
        row.widths.append((found.high - found.low) / 2)
        row.errors.append(found.percent - row.inject_percent)
    if verdict is not Verdict.INVALID:
        for name, alarm in other_judges.alarms(evidence.segments).items():
            row.rivals[name] = row.rivals.get(name, 0) + alarm
    return verdict


MISS_PERCENT = 2.0
"""Really slowed by so much or more, twice the budget, and called `within`: a miss. (0 of 2000 simulated.)"""


def exit_code(report: Report) -> ExitCode:
    """0: nothing wrong; 1: a miss or a false alarm; 5: not all that was to be tried was."""
    alarms = sum(row.count(Verdict.OVER) for row in report.rows if row.inject_percent == 0)
    misses = sum(
        row.count(Verdict.WITHIN)
        for row in report.rows
        if row.inject_percent >= MISS_PERCENT and not row.scaled
    )
    if alarms or misses or any(plant.found is False for plant in report.plants):
        return ExitCode.OVER
    return (
        ExitCode.INCOMPLETE
        if report.untried or any(plant.found is None for plant in report.plants)
        else ExitCode.WITHIN
    )


def turns(subjects: Sequence[str], injected: Sequence[float]) -> Iterator[tuple[str, float]]:
    """Endless (subject, slowdown): those of the list in its order if it holds a 0, else one of identical code
    before each."""
    alternating = [percent for cost in injected for percent in (0.0, cost)]
    order = injected if 0.0 in injected else alternating or [0.0]
    while True:
        for subject in subjects:
            for percent in order:
                yield subject, percent
