"""What a gate measured, and the verdict on it: pure but for the machine and the clock, which the receipt
reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bench import files
from bench.gate.counters import Counted, added
from bench.machine import identity, state
from bench.measure.plan import MIN_SEGMENT_S
from bench.records.receipt import BaselineView, Receipt
from bench.records.types import (
    Commit,
    ConfigRef,
    ExitCode,
    GpuState,
    Interval,
    Machine,
    MachineState,
    Segment,
    Throughput,
    Verdict,
)
from bench.statistics.contrasts import contrasts
from bench.statistics.intervals import interval, throughput
from bench.statistics.verdict import Judgement, judge_pair
from bench.subjects.protocol import Settings, SubjectKind

BASE, HEAD = "base", "head"
MINUTES = 10.0
MEMORY_PERCENT = 2.0
"""Every launch of head needs this much more memory than every launch of base: over. Peak memory hardly
varies."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for. `inject_percent` slows head by a known share, to see it found."""

    base: str
    config: Settings
    kind: SubjectKind
    minutes: float = MINUTES
    budget_percent: float = 1.0
    seed: int = 0
    out: str | None = None
    inject_percent: float = 0.0
    launches: int | None = None
    min_segment_s: float = MIN_SEGMENT_S

    @property
    def time_s(self) -> float:
        return 60.0 * self.minutes


@dataclass(slots=True)
class Launch:
    """What one pair of processes gave."""

    segments: list[Segment] = field(default_factory=list)
    losses: dict[str, tuple[float, ...]] = field(default_factory=dict)
    memory_bytes: dict[str, int] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)


@dataclass(slots=True)
class GateEvidence:
    """Everything that a gate's verdict is taken from."""

    launches: list[Launch] = field(default_factory=list)
    cycle: int = 1
    incomplete: list[str] = field(default_factory=list)
    not_comparable: list[str] = field(default_factory=list)
    counted: Counted = field(default_factory=Counted)
    machine: Machine | None = None
    before: MachineState | None = None
    after: MachineState | None = None
    seen: list[GpuState] = field(default_factory=list)
    """GPUs between two rounds."""
    stopped: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def segments(self) -> list[Segment]:
        return [segment for launch in self.launches for segment in launch.segments]

    def interval(self) -> Interval | None:
        """Head against base over the launches."""
        return interval(contrasts(self.segments, (HEAD,), (BASE,), self.cycle))


def counts_added(evidence: GateEvidence) -> tuple[dict[str, int | None], list[str]]:
    """What head counts more than base by kind, and why that cannot be told."""
    return added(evidence.counted, BASE, HEAD)


def memory_rise(launches: Sequence[Launch]) -> str:
    """One line when every launch of head takes clearly more memory than every launch of base."""
    base = [launch.memory_bytes[BASE] for launch in launches if BASE in launch.memory_bytes]
    head = [launch.memory_bytes[HEAD] for launch in launches if HEAD in launch.memory_bytes]
    if not base or not head or min(head) <= max(base) * (1 + MEMORY_PERCENT / 100):
        return ""
    return f"peak memory rose from at most {max(base) / 1e6:,.0f} MB to at least {min(head) / 1e6:,.0f} MB"


def make_receipt(
    options: Options, evidence: GateEvidence, base: Commit, head: Commit, seconds: float
) -> Receipt:
    """Judge the evidence. Pure but for the machine and the clock, which are read here."""
    judgement = judge(options, evidence)
    segments = evidence.segments
    found = throughput(segments, HEAD)
    losses = evidence.launches[-1].losses if evidence.launches else {}
    return Receipt(
        command="gate",
        commit=head,
        machine=evidence.machine or identity.identify(options.kind.devices(options.config)),
        config=ConfigRef(options.config.name, options.config.digest()),
        arms={name: tuple(s for s in segments if s.arm == name) for name in (BASE, HEAD)},
        losses_equal=None if not losses else not evidence.not_comparable,
        collectors=(),
        all=None if judgement.all is None else replace(judgement.all, name=HEAD),
        throughput=None if found is None else Throughput(*found),
        baseline=BaselineView("not-used", note="a gate compares two commits on one machine, now"),
        pipeline_efficiency=None,
        verdict=judgement.verdict,
        exit_code=judgement.exit_code,
        created=files.now_utc(),
        budget_percent=options.budget_percent,
        collector_budget_percent=options.budget_percent,
        reasons=judgement.reasons,
        counts=evidence.counted.shown,
        losses=losses,
        before=evidence.before,
        after=evidence.after,
        subject=options.kind.name,
        cycle=evidence.cycle,
        options={
            "base": options.base,
            "seed": options.seed,
            "minutes": options.minutes,
            "launches": len(evidence.launches),
            "inject_percent": options.inject_percent,
            "stopped": evidence.stopped,
            "seconds": round(seconds, 1),
        },
        extra={"base": {"commit": base.id}, "sides": sides(evidence), "notes": evidence.notes},
    )


def judge(options: Options, evidence: GateEvidence, *, counts_required: bool = True) -> Judgement:
    """The verdict: of the contrast, of the exact counts, and of peak memory."""
    more, faults = counts_added(evidence)
    incomplete = list(evidence.incomplete)
    if (
        not incomplete
        and not evidence.not_comparable
        and options.kind.counted
        and counts_required
        and not evidence.counted.by_counter
    ):
        incomplete.append("incomplete: exact counts were not taken")
    unfit = state.unfit(evidence.before, evidence.after) if evidence.before and evidence.after else ()
    found = None if evidence.not_comparable and not evidence.segments else evidence.interval()
    if found is None and evidence.not_comparable:
        # The work differs, so nothing was measured; that is the reason, not the missing interval.
        return Judgement(Verdict.INVALID, ExitCode.INVALID, (*evidence.not_comparable, *incomplete))
    judgement = judge_pair(
        found,
        options.budget_percent,
        added=more,
        incomplete=incomplete,
        not_comparable=[*evidence.not_comparable, *faults],
        unfit=unfit,
        name=HEAD,
    )
    memory = memory_rise(evidence.launches)
    if memory and judgement.exit_code in (ExitCode.WITHIN, ExitCode.UNRESOLVED):
        return replace(
            judgement, verdict=Verdict.OVER, exit_code=ExitCode.OVER, reasons=(memory, *judgement.reasons)
        )
    return judgement


def sides(evidence: GateEvidence) -> dict[str, dict[str, float | int | None]]:
    """Throughput, slowest steps and memory of each side, for the report; none of it is judged by its own."""
    table: dict[str, dict[str, float | int | None]] = {}
    for name in (BASE, HEAD):
        steps = sorted(second for s in evidence.segments if s.arm == name for second in s.step_seconds)
        speed = throughput(evidence.segments, name)
        memory = [launch.memory_bytes[name] for launch in evidence.launches if name in launch.memory_bytes]
        table[name] = {
            "tokens_per_second": None if speed is None else round(speed[0], 2),
            "step_p50_ms": round(1e3 * steps[len(steps) // 2], 3) if steps else None,
            "step_p99_ms": round(1e3 * steps[min(len(steps) - 1, int(0.99 * len(steps)))], 3)
            if steps
            else None,
            "peak_memory_bytes": max(memory) if memory else None,
        }
    return table
