"""What a gate measured, and the verdict on it: pure but for the machine and the clock, which the receipt
reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from steptime import run_files
from steptime.gate.counters import Counted, added, rises
from steptime.gate.launch import BASE, HEAD, Launch
from steptime.machine import identity, state
from steptime.measure.lengths import Lengths
from steptime.records.costs import Estimate
from steptime.records.pairs import Layer, Pair
from steptime.records.receipt import BaselineView, Receipt, SegmentLengths
from steptime.records.types import Commit, ConfigRef, GpuState, MachineState, Throughput
from steptime.statistics.effects import estimate_launches
from steptime.statistics.intended import Allowance, Numerics, allow, compare_losses
from steptime.statistics.judging import Judgement, judge_gate
from steptime.statistics.throughput import of_segments, off_segments, on_segments
from steptime.subjects.protocol import Settings, SubjectKind

MINUTES = 10.0
COMPARED_STEPS = 12
MEMORY_PERCENT = 2.0
"""Every launch of head needs this much more memory than every launch of base: over. Peak memory hardly
varies."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for.

    Attributes:
        inject: slows head by a known cost, `5@tick`; empty: none.
        numerics: how equal losses must be; `numerics_reason` why they may differ.
        compare_steps: training steps whose losses and gradient norms are compared before measuring.
        install: makes the environment of a tree, where the subject is a file of the user's.
        head_subject: head's subject over base's code.
        allowances: exact counts that may rise, each with its reason.
    """

    base: str
    config: Settings
    kind: SubjectKind
    minutes: float = MINUTES
    budget_percent: float = 1.0
    seed: int = 0
    out: str | None = None
    inject: str = ""
    launches: int | None = None
    numerics: Numerics = Numerics.SAME
    numerics_reason: str = ""
    compare_steps: int = COMPARED_STEPS
    allowances: tuple[Allowance, ...] = ()
    install: str = ""
    head_subject: bool = False

    @property
    def time_s(self) -> float:
        return 60.0 * self.minutes


@dataclass(slots=True)
class GateEvidence:
    """Everything that a gate's verdict is taken from."""

    pairs: list[Pair] = field(default_factory=list)
    memory_bytes: list[dict[str, int]] = field(default_factory=list)
    seconds_per: dict[Layer, float] = field(default_factory=dict)
    lengths: Lengths | None = None
    minutes: float = 0.0
    incomplete: list[str] = field(default_factory=list)
    not_comparable: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    counted: Counted = field(default_factory=Counted)
    compared_steps: int = 0
    before: MachineState | None = None
    after: MachineState | None = None
    seen: list[GpuState] = field(default_factory=list)
    """GPUs between two blocks of pairs."""
    stopped: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def launches(self) -> int:
        return len({pair.process for pair in self.pairs})

    def add(self, found: Launch, options: Options) -> None:
        """Take in what a launch gave, and compare the losses of its two sides."""
        self.pairs += found.pairs
        self.memory_bytes.append(found.memory_bytes)
        self.seconds_per, self.lengths = found.seconds_per, found.lengths
        self.minutes += found.minutes
        self.seen += found.seen
        self.incomplete += found.faults
        self.notes += [note for note in found.notes if note not in self.notes]
        self.not_comparable += found.repeats
        base, head = found.losses.get(BASE, {}), found.losses.get(HEAD, {})
        both = sorted(set(base) & set(head))
        compared = compare_losses(
            [base[group] for group in both],
            [head[group] for group in both],
            options.numerics,
            reason=options.numerics_reason,
            of="loss of group",
        )
        if compared.refused:
            self.not_comparable.append(f"not comparable, the work differs: {compared.refused}")
        if compared.accepted and compared.accepted not in self.accepted:
            self.accepted.append(compared.accepted)

    def estimate(self, budget_percent: float) -> Estimate | None:
        """Head against base over the launches; None below the fewest launches."""
        return estimate_launches(self.pairs, HEAD, self.seconds_per, budget_percent)


def memory_rise(launches: Sequence[dict[str, int]]) -> str:
    """One line when every launch of head takes clearly more memory than every launch of base.

    Args:
        launches: peak bytes of each side.
    """
    base = [launch[BASE] for launch in launches if BASE in launch]
    head = [launch[HEAD] for launch in launches if HEAD in launch]
    if not base or not head or min(head) <= max(base) * (1 + MEMORY_PERCENT / 100):
        return ""
    return f"peak memory rose from at most {max(base) / 1e6:,.0f} MB to at least {min(head) / 1e6:,.0f} MB"


def make_receipt(
    options: Options, evidence: GateEvidence, base: Commit, head: Commit, seconds: float
) -> Receipt:
    """Judge the evidence. Pure but for the machine and the clock, which are read here."""
    judgement = judge(options, evidence)
    found = of_segments(on_segments(evidence.pairs, HEAD))
    lengths = evidence.lengths
    return Receipt(
        command="gate",
        commit=head,
        machine=identity.identify(options.kind.devices(options.config)),
        config=ConfigRef(options.config.name, options.config.digest()),
        pairs=tuple(evidence.pairs),
        losses_equal=_losses_equal(evidence),
        collectors=(),
        all=judgement.all,
        throughput=None if found is None else Throughput(*found),
        baseline=BaselineView("not-used", note="a gate compares two commits on one machine, now"),
        pipeline_efficiency=None,
        verdict=judgement.verdict,
        exit_code=judgement.exit_code,
        created=run_files.now_utc(),
        headline=judgement.headline,
        budget_percent=options.budget_percent,
        collector_budget_percent=options.budget_percent,
        reasons=judgement.reasons,
        accepted=judgement.accepted,
        seconds_per=dict(evidence.seconds_per),
        lengths=None if lengths is None else SegmentLengths(lengths.steps, lengths.settled_steps),
        minutes=round(evidence.minutes, 3),
        counts=evidence.counted.shown,
        before=evidence.before,
        after=evidence.after,
        subject=options.kind.name,
        options={
            "base": options.base,
            "seed": options.seed,
            "minutes": options.minutes,
            "launches": evidence.launches,
            "inject": options.inject or None,
            "numerics": options.numerics.value,
            "stopped": evidence.stopped,
            "seconds": round(seconds, 1),
        },
        extra={
            "base": {"commit": base.id},
            "sides": sides(evidence),
            "notes": evidence.notes,
            "compared_steps": evidence.compared_steps,
        },
    )


def _losses_equal(evidence: GateEvidence) -> bool | None:
    if evidence.not_comparable:
        return False
    found = {pair.losses_equal for pair in evidence.pairs}
    return None if not found or None in found or evidence.accepted else False not in found


def judge(options: Options, evidence: GateEvidence, *, counts_required: bool = True) -> Judgement:
    """The verdict: of the times, of the exact counts, and of peak memory."""
    more, faults = added(evidence.counted, BASE, HEAD)
    allowed = allow(more, rises(evidence.counted, BASE, HEAD), options.allowances)
    left = {kind: allowed.left.get(kind, 0) if (n or 0) > 0 else n for kind, n in more.items()}
    incomplete = list(evidence.incomplete)
    unasked = not incomplete and not evidence.not_comparable and options.kind.counted and counts_required
    if unasked and not evidence.counted.by_counter:
        incomplete.append("incomplete: exact counts were not taken")
    unfit = state.unfit(evidence.before, evidence.after) if evidence.before and evidence.after else ()
    return judge_gate(
        evidence.estimate(options.budget_percent),
        options.budget_percent,
        minutes=evidence.minutes,
        launches=evidence.launches,
        added=left,
        incomplete=incomplete,
        not_comparable=[*evidence.not_comparable, *faults],
        unfit=unfit,
        accepted=[*evidence.accepted, *allowed.accepted, *allowed.unused],
        memory_rise=memory_rise(evidence.memory_bytes),
        name=HEAD,
    )


def sides(evidence: GateEvidence) -> dict[str, dict[str, float | int | None]]:
    """Throughput, slowest steps and memory of each side, for the report; none of it is judged by its own."""
    table: dict[str, dict[str, float | int | None]] = {}
    for name in (BASE, HEAD):
        own = on_segments(evidence.pairs, HEAD) if name == HEAD else off_segments(evidence.pairs)
        steps = sorted(second for segment in own for second in segment.step_seconds)
        speed = of_segments(own)
        memory = [launch[name] for launch in evidence.memory_bytes if name in launch]
        table[name] = {
            "tokens_per_second": None if speed is None else round(speed[0], 2),
            "step_p50_ms": round(1e3 * steps[len(steps) // 2], 3) if steps else None,
            "step_p99_ms": round(1e3 * steps[min(len(steps) - 1, int(0.99 * len(steps)))], 3)
            if steps
            else None,
            "peak_memory_bytes": max(memory) if memory else None,
        }
    return table
