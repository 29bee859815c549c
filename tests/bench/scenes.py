"""Receipts of made-up runs that the reports are tested with: nothing in them hangs on this machine, commit or
day."""

from __future__ import annotations

from dataclasses import replace

from bench.records.receipt import BaselineView, Receipt
from bench.records.types import (
    ALL,
    OFF,
    Commit,
    ConfigRef,
    CountedPlace,
    ExactCounts,
    ExitCode,
    GpuState,
    Machine,
    MachineState,
    Measurement,
    Throughput,
    Verdict,
)
from bench.statistics.analysis import analyse
from bench.statistics.verdict import Judgement, judge, judge_pair
from tests.bench.make import interval, measurement, segment

MACHINE = Machine(
    "1x-h200-0a1b2c3d",
    "AMD EPYC 9654",
    16,
    (("NVIDIA H200", "0a1b2c3d"),),
    {"python": "3.12.4", "torch": "2.13.0", "driver": "580.65"},
)
COMMIT = Commit("0123456789abcdef0123456789abcdef01234567")
CONFIG = ConfigRef("h200-single", "00112233aabbccdd")
STATED = BaselineView(
    "other-machine", 14200.0, "stated", machine="pro6000x8", config="qwen3.6-27b", date="2026-11-29"
)


def state(temperature: int, reasons: tuple[str, ...] = ()) -> MachineState:
    gpu = GpuState(0, 1755, 1980, temperature, 512.0, 700.0, reasons, 0)
    return MachineState(monotonic_s=100.0, load_1m=1.25, cpus=16, cpu_mhz=2400.0, gpus=(gpu,))


def receipt(made: Measurement, judgement: Judgement, **changes: object) -> Receipt:
    analysis = analyse(made)
    arms = {arm.name: tuple(s for s in made.segments if s.arm == arm.name) for arm in made.arms}
    found = Receipt(
        command="overhead",
        commit=COMMIT,
        machine=MACHINE,
        config=CONFIG,
        arms=arms,
        losses_equal=analysis.losses_equal,
        collectors=judgement.collectors,
        all=judgement.all,
        throughput=analysis.throughput,
        baseline=STATED,
        pipeline_efficiency=None,
        verdict=judgement.verdict,
        exit_code=judgement.exit_code,
        created="2026-11-29T12:00:00Z",
        reasons=judgement.reasons,
        aa=analysis.aa,
        counts=dict(made.counts),
        losses={arm.name: (2.5, 2.25, 2.75, 2.625) for arm in made.arms},
        before=state(48),
        after=state(61),
        subject="trainer",
        cycle=made.cycle,
        options={"seed": 0, "minutes": 4.0, "quick": False, "stopped": "clear", "washout_steps": 1},
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def within() -> Receipt:
    made = measurement()
    return receipt(made, judge(analyse(made)))


def unresolved() -> Receipt:
    """Too noisy to say."""
    made = measurement(noise=0.04, seed=3)
    return receipt(made, judge(analyse(made)))


def slower() -> Receipt:
    """One collector that costs a little, and it is not clear how much."""
    made = measurement({"profile": 0.006}, noise=0.012, seed=1)
    return receipt(made, judge(analyse(made)))


def over() -> Receipt:
    """One collector that costs 2% and reads the loss on the host."""
    made = measurement({"profile": 0.02})
    counts = dict(made.counts)
    for name in ("only:profile", "all", "without:pipeline"):
        old = counts[name]
        place = CountedPlace(
            "sync", "drafter/0", "dflash/observe/collectors/profile.py:41 sample (item())", 8, 8
        )
        counts[name] = replace(old, syncs=8, places=(place,))
    made = replace(made, counts=counts)
    return receipt(
        made,
        judge(analyse(made)),
        baseline=BaselineView("missing", note="record one: python -m bench baseline record"),
    )


def invalid() -> Receipt:
    """A throttled GPU, and a collector that changes training."""
    made = measurement()
    spoiled = tuple(
        replace(s, losses_digest="other") if s.arm == "only:pipeline" else s for s in made.segments
    )
    made = replace(made, segments=spoiled)
    judgement = judge(analyse(made), unfit=["GPU 0 was throttled after measuring: hardware thermal slowdown"])
    losses = {arm.name: (2.5, 2.25, 2.75, 2.625) for arm in made.arms} | {
        "only:pipeline": (2.5, 2.25, 2.75, 2.6250001)
    }
    return receipt(made, judgement, losses=losses, after=state(91, ("hardware thermal slowdown",)))


def incomplete() -> Receipt:
    """The run crashed in its second round; nothing was counted."""
    made = replace(
        measurement(rounds_=1),
        counts={},
        faults=("trainer crashed after 9 segments: RuntimeError: out of memory",),
    )
    return receipt(
        made,
        judge(analyse(made)),
        throughput=None,
        aa=None,
        losses={},
        before=None,
        after=None,
        commit=Commit("", dirty=True),
    )


def gate() -> Receipt:
    """Head is 2% slower than base and launches one more operation in each step."""
    segments = {
        name: tuple(
            segment(name, round_, [0.1 * slow, 0.12 * slow], order, process=launch)
            for launch in range(3)
            for round_ in range(4)
            for order in orders
        )
        for name, slow, orders in (("base", 1.0, (0, 3)), ("head", 1.02, (1, 2)))
    }
    place = CountedPlace(
        "operation", "drafter/0", "dflash/pipeline/drafter_worker.py:97 step (operation)", 4, 4
    )
    counts = {
        "base": ExactCounts("base", 4, True, 0, 4000, 8, 0, ways=("modes",)),
        "head": ExactCounts("head", 4, True, 0, 4004, 8, 0, places=(place,), ways=("modes",)),
    }
    added = {"syncs": 0, "operations": 4, "copies": 0, "allocations": 0}
    judgement = judge_pair(interval(1.96, 1.52, 2.39, n=3), 1.0, added=added, name="head")
    sides = {
        "base": {
            "tokens_per_second": 14210.5,
            "step_p50_ms": 110.2,
            "step_p99_ms": 131.0,
            "peak_memory_bytes": 61_000_000_000,
        },
        "head": {
            "tokens_per_second": 13931.0,
            "step_p50_ms": 112.3,
            "step_p99_ms": 140.5,
            "peak_memory_bytes": 61_000_000_000,
        },
    }
    return Receipt(
        command="gate",
        commit=replace(COMMIT, dirty=True, diff_hash="feedbeef00112233"),
        machine=MACHINE,
        config=CONFIG,
        arms=segments,
        losses_equal=True,
        collectors=(),
        all=judgement.all,
        throughput=Throughput(13931.0, 13880.0, 13982.0),
        baseline=BaselineView("not-used"),
        pipeline_efficiency=None,
        verdict=judgement.verdict,
        exit_code=judgement.exit_code,
        created="2026-11-29T12:00:00Z",
        collector_budget_percent=1.0,
        reasons=judgement.reasons,
        counts=counts,
        losses={"base": (2.5, 2.25), "head": (2.5, 2.25)},
        before=state(48),
        after=state(61),
        subject="trainer",
        cycle=2,
        options={"base": "HEAD^1", "seed": 0, "minutes": 10.0, "launches": 3, "stopped": "time"},
        extra={"base": {"commit": "fedcba9876543210fedcba9876543210fedcba98"}, "sides": sides, "notes": []},
    )


def no_base() -> Receipt:
    """The base commit is older than the harness."""
    reason = (
        "base 0011223344 predates the harness (it has no bench/gate_worker.py): there is nothing to compare "
        "with"
    )
    judgement = judge_pair(None, 1.0, incomplete=[reason], name="head")
    empty = {
        "arms": {"base": (), "head": ()},
        "counts": {},
        "losses": {},
        "losses_equal": None,
        "throughput": None,
    }
    return replace(
        gate(),
        all=judgement.all,
        verdict=judgement.verdict,
        exit_code=judgement.exit_code,
        reasons=judgement.reasons,
        extra={"base": {"commit": ""}, "sides": {}, "notes": []},
        **empty,  # type: ignore[arg-type]
    )


SCENES = {
    scene.__name__: scene for scene in (within, unresolved, slower, over, invalid, incomplete, gate, no_base)
}

__all__ = ["ALL", "OFF", "SCENES", "ExitCode", "Verdict"]
