"""Runs of a self-check as they were measured, one JSON line each: judged again, added up over days, or slowed
on paper."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from dflash.config import Config
from steptime.errors import UserError
from steptime.gate import verdict
from steptime.gate.verdict import HEAD, GateEvidence, Options
from steptime.machine import state
from steptime.records.pairs import ALL, Layer, Pair, Segment
from steptime.records.strict_json import explain
from steptime.records.types import STRICT, MachineState, slowdown_percent
from steptime.statistics.judging import Budgets, Evidence, Judgement, judge
from steptime.statistics.observed import observe
from steptime.statistics.one_switch import Observed
from steptime.subjects.injection import Injection, parse_injection

SIGNIFICANT: Final = 9
"""Times are kept to the nanosecond."""


class Command(enum.StrEnum):
    """What a trial is one of."""

    GATE = "gate"
    OVERHEAD = "overhead"


@dataclass(frozen=True, slots=True)
class Trial:
    """A gate of a tree against itself, or a run of `overhead` on switches of known cost.

    Attributes:
        subject: what was run.
        inject: the known cost, `2@step`; empty: none.
        minutes: given to the run at most.
        machine: in words.
        switches: what is judged; a gate's is head.
        minutes_taken: that pairs took.
    """

    __pydantic_config__ = STRICT

    command: Command
    subject: str
    inject: str
    minutes: float
    seed: int
    machine: str
    commit: str
    pairs: tuple[Pair, ...]
    seconds_per: dict[Layer, float]
    switches: tuple[str, ...] = (HEAD,)
    minutes_taken: float = 0.0
    incomplete: tuple[str, ...] = ()
    not_comparable: tuple[str, ...] = ()
    before: MachineState | None = None
    after: MachineState | None = None

    @property
    def dear(self) -> str:
        """The switch that has the known cost; that of one that is slowed on paper."""
        given = parse_injection(self.inject or "0")
        return given.name if self.inject and self.command is Command.OVERHEAD else self.switches[0]

    def judge(self) -> Judgement:
        """What the command says of it, by times alone: counts and accounted costs would give a known cost
        away."""
        return self._judge_gate() if self.command is Command.GATE else self._judge_overhead()

    def _judge_gate(self) -> Judgement:
        from bench.subjects.registry import SUBJECTS  # heavy: torch

        evidence = GateEvidence(
            pairs=list(self.pairs),
            seconds_per=self.seconds_per,
            minutes=self.minutes_taken,
            incomplete=list(self.incomplete),
            not_comparable=list(self.not_comparable),
            before=self.before,
            after=self.after,
        )
        options = Options(base="HEAD", config=Config(), kind=SUBJECTS[self.subject])
        return verdict.judge(options, evidence, counts_required=False)

    def _judge_overhead(self) -> Judgement:
        budgets = Budgets()
        found = observe(self.pairs, self.switches, self.seconds_per, budgets, self.seed)
        evidence = Evidence(
            collectors=tuple(Observed(name, found.collectors.get(name)) for name in self.switches),
            all=Observed(ALL, found.all),
            minutes=self.minutes_taken,
            incomplete=(*self.incomplete, *found.incomplete),
            losses_equal=found.losses_equal,
            loss_notes=self.not_comparable,
        )
        unfit = state.unfit(self.before, self.after) if self.before and self.after else ()
        return judge(evidence, budgets, unfit, counts_required=False)


def true_percent(given: Injection | str) -> float:
    """Share of the throughput that a known cost takes; one at a tick takes a little less than it says, since
    it comes on top of the tick's period."""
    one = parse_injection(given or "0") if isinstance(given, str) else given
    return one.percent if one.layer is Layer.PATH else slowdown_percent(one.percent / 100.0)


def slowed(trial: Trial, percent: float) -> Trial:
    """The same run with a switch that loses `percent` of the throughput in the path, evenly: real noise, and
    a cost known exactly."""
    factor, name = 1.0 / (1.0 - percent / 100.0), trial.switches[0]

    def slow(segment: Segment) -> Segment:
        return replace(segment, seconds=segment.seconds * factor) if name in segment.on else segment

    return replace(
        trial,
        pairs=tuple(
            replace(pair, first=slow(pair.first), second=slow(pair.second))
            if pair.layer is Layer.PATH
            else pair
            for pair in trial.pairs
        ),
    )


def append(path: Path, trial: Trial) -> None:
    """Add one line; the times of single steps are left out, as nothing is judged by them."""

    def short(segment: Segment) -> Segment:
        return replace(segment, seconds=round(segment.seconds, SIGNIFICANT), step_seconds=())

    pairs = tuple(replace(pair, first=short(pair.first), second=short(pair.second)) for pair in trial.pairs)
    with path.open("ab") as file:
        file.write(_ADAPTER.dump_json(replace(trial, pairs=pairs)) + b"\n")


def read(path: Path) -> Iterator[Trial]:
    """Every trial of a file.

    Raises:
        UserError: naming file and line.
    """
    want = "want a trials.jsonl of `bench selfcheck`"
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield _ADAPTER.validate_json(line)
                except ValidationError as error:
                    raise UserError(f"{path}:{number}: {explain(error)}; {want}") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {want}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: {error}; {want}") from None


_ADAPTER: Final = TypeAdapter(Trial)
