"""Pure: what was measured in, what it shows out; the verdict is taken elsewhere.

Isolated cost of a collector: `only:<c>` against `off`. Marginal cost: `all` against `without:<c>`. They
differ where two collectors share a wait, so both are kept, and isolated costs are never added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.records.types import (
    ALL,
    OFF,
    OFF_AGAIN,
    ONLY,
    WITHOUT,
    ExactCounts,
    Interval,
    Measurement,
    Segment,
    Throughput,
)
from bench.statistics.contrasts import contrasts, rounds_of
from bench.statistics.intervals import interval, throughput

COUNT_KINDS = ("syncs", "operations", "copies", "allocations")


@dataclass(frozen=True, slots=True)
class CollectorEvidence:
    """What speaks for or against one collector, or "all".

    Attributes:
        isolated, marginal: paired contrasts; None when the arms or two whole rounds of them are missing. For
            "all" both are the contrast of `all` against `off`.
        accounted_percent: what the instruments and the monitor take themselves, share of the step.
        added: kind -> arm's count less `off`'s, over the same steps; None where this machine cannot count the
            kind.
        count_fault: why its counts mean nothing, or empty.
        losses_differ: its arms trained differently from `off`.
    """

    name: str
    isolated: Interval | None
    marginal: Interval | None
    accounted_percent: float | None = None
    added: Mapping[str, int | None] | None = None
    count_fault: str = ""
    losses_differ: bool = False


@dataclass(frozen=True, slots=True)
class Analysis:
    """Everything a verdict is taken from.

    Attributes:
        rounds: whole rounds (every arm of the plan present), over all processes.
        missing: arms of the plan that no segment came from.
        losses_equal: None when no losses were recorded for some arm.
        loss_notes: which arms differ from `off`, or have no losses, one line each.
    """

    collectors: tuple[CollectorEvidence, ...]
    all: CollectorEvidence | None
    aa: Interval | None
    throughput: Throughput | None
    rounds: int
    missing: tuple[str, ...]
    losses_equal: bool | None
    loss_notes: tuple[str, ...]
    counted: bool
    has_aa: bool
    faults: tuple[str, ...] = ()
    together: bool = False
    """The plan asks about all collectors as one, so none has evidence of its own."""


def analyse(measurement: Measurement) -> Analysis:
    """Intervals, count differences and equality of the losses of a measurement; never raises for a poor
    one."""
    segments, planned = measurement.segments, {arm.name for arm in measurement.arms}
    present = {segment.arm for segment in segments}
    equal, notes, differing = compare_losses(segments, [arm.name for arm in measurement.arms])
    return Analysis(
        collectors=tuple(_evidence(measurement, name, planned, differing) for name in measurement.collectors),
        all=_evidence_all(measurement, differing) if ALL in planned else None,
        aa=interval(contrasts(segments, (OFF_AGAIN,), (OFF,), measurement.cycle)),
        throughput=_throughput(segments),
        rounds=sum({s.arm for s in members} >= planned for members in rounds_of(segments).values())
        if planned
        else 0,
        missing=tuple(arm.name for arm in measurement.arms if arm.name not in present),
        losses_equal=equal,
        loss_notes=notes,
        counted=bool(measurement.counts),
        has_aa=OFF_AGAIN in planned,
        faults=measurement.faults,
        together=not measurement.collectors and planned == {OFF, ALL, OFF_AGAIN},
    )


def _evidence(
    measurement: Measurement, name: str, planned: set[str], differing: frozenset[str]
) -> CollectorEvidence:
    segments, cycle = measurement.segments, measurement.cycle
    only, without = ONLY + name, WITHOUT + name
    together = [arm.name for arm in measurement.arms if name in arm.collectors and arm.name != only]
    ceiling = contrasts(segments, together, (OFF,), cycle) if together else None
    added, fault = count_difference(measurement.counts, only)
    marginal = contrasts(segments, (ALL,), (without,), cycle) if {ALL, without} <= planned else None
    return CollectorEvidence(
        name=name,
        isolated=interval(contrasts(segments, (only,), (OFF,), cycle), ceiling),
        marginal=None if marginal is None else interval(marginal),
        accounted_percent=measurement.accounted_percent.get(name),
        added=added,
        count_fault=fault,
        losses_differ=only in differing,
    )


def _evidence_all(measurement: Measurement, differing: frozenset[str]) -> CollectorEvidence:
    found = interval(contrasts(measurement.segments, (ALL,), (OFF,), measurement.cycle))
    added, fault = count_difference(measurement.counts, ALL)
    accounted = measurement.accounted_percent.get(ALL)
    return CollectorEvidence(ALL, found, found, accounted, added, fault, losses_differ=ALL in differing)


def _throughput(segments: Sequence[Segment]) -> Throughput | None:
    found = throughput(segments, OFF)
    return None if found is None else Throughput(*found)


def count_difference(counts: Mapping[str, ExactCounts], arm: str) -> tuple[dict[str, int | None] | None, str]:
    """What `arm` counts beyond `off`, by kind, and a fault when the numbers mean nothing.

    (None, "") when nothing was counted at all: whether that is allowed is the verdict's affair.
    """
    if not counts:
        return None, ""
    return difference(counts.get(OFF), counts.get(arm), f"arm {OFF!r}", f"arm {arm!r}")


def difference(
    one: ExactCounts | None, other: ExactCounts | None, name: str, other_name: str
) -> tuple[dict[str, int | None] | None, str]:
    """What `other` counts beyond `one`, by kind; or None and why the two cannot be compared."""
    for counts, of in ((one, name), (other, other_name)):
        if counts is None:
            return None, f"exact counts of {of} are missing"
        if not counts.armed:
            why = f": {'; '.join(counts.unavailable)}" if counts.unavailable else ""
            return None, f"the counter of {of} was not armed{why}"
    assert one is not None
    assert other is not None
    if one.steps != other.steps or one.steps <= 0:
        return None, f"{other_name} was counted over {other.steps} steps, {name} over {one.steps}"
    if set(one.ways) != set(other.ways):
        return (
            None,
            f"{other_name} was counted by other ways ({', '.join(other.ways)}) than {name} "
            f"({', '.join(one.ways)})",
        )
    added: dict[str, int | None] = {}
    for kind in COUNT_KINDS:
        before, after = getattr(one, kind), getattr(other, kind)
        added[kind] = None if before is None or after is None else after - before
    if added["syncs"] is None:
        return None, f"syncs of {other_name} were not counted"
    return added, ""


def compare_losses(
    segments: Sequence[Segment], arms: Sequence[str]
) -> tuple[bool | None, tuple[str, ...], frozenset[str]]:
    """(equal, notes, arms that differ): whether every segment of every arm gave the losses that `off` gave,
    bit for bit.

    Segments whose losses were lost on the way are passed over; an arm with none at all makes the answer None.
    """
    digests: dict[str, set[str]] = {arm: set() for arm in arms}
    for segment in segments:
        if segment.losses_digest:
            digests.setdefault(segment.arm, set()).add(segment.losses_digest)
    silent = [arm for arm in arms if not digests[arm]]
    reference = digests.get(OFF, set())
    differing = frozenset(
        arm for arm, found in digests.items() if found and (len(found) > 1 or found != reference)
    )
    if len(reference) > 1:
        return False, ("the losses of arm 'off' differ between its own segments",), differing
    notes = [f"the losses of arm {arm!r} are not those of {OFF!r}" for arm in arms if arm in differing]
    notes += [f"no losses were recorded for arm {arm!r}" for arm in silent]
    if differing:
        return False, tuple(notes), differing
    return (None if silent or not arms else True), tuple(notes), differing
