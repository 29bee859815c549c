"""Receipts of made-up runs that the reports are tested with: nothing in them hangs on this machine, commit or
day."""

from __future__ import annotations

from dataclasses import replace

from steptime.measure.run import Measured
from steptime.records.pairs import Layer, Pair, Question, Segment
from steptime.records.receipt import BaselineView, Receipt
from steptime.records.types import (
    Commit,
    ConfigRef,
    CountedPlace,
    ExactCounts,
    GpuState,
    Machine,
    MachineState,
    Throughput,
)
from steptime.statistics.judging import judge_gate
from tests.steptime.make import counts, estimate, measured, receipt_of

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


def receipt(made: Measured, **changes: object) -> Receipt:
    settled: dict[str, object] = {
        "baseline": STATED,
        "before": state(48),
        "after": state(61),
        "subject": "trainer",
        "created": "2026-11-29T12:00:00Z",
        "options": {"seed": 0, "minutes": 8.0, "quick": False, "stopped": made.stopped},
    }
    return receipt_of(made, MACHINE, CONFIG, COMMIT, **(settled | changes))


def within() -> Receipt:
    """With a control that was found."""
    return receipt(measured(control=(0.02, 0.02)))


def unresolved() -> Receipt:
    """Too noisy to say."""
    return receipt(replace(measured(noise=0.08, seed=3), stopped="time"))


def slower() -> Receipt:
    """One collector that costs something, and it is not clear how much."""
    return receipt(replace(measured({"profile": 0.004}, noise=0.013, seed=1), stopped="time"))


def over() -> Receipt:
    """One collector that costs 2% and reads the loss on the host."""
    found = counts(profile=8)
    where = "dflash/observe/collectors/profile.py:41 sample (item())"
    place = CountedPlace("sync", "drafter/0", where, 8, 8)
    for name in ("profile", "all"):
        found[name] = replace(found[name], places=(place,))
    missing = BaselineView("missing", note="record one: python -m bench baseline record")
    return receipt(measured({"profile": 0.0067}), counted=found, baseline=missing)


def invalid() -> Receipt:
    """A throttled GPU, and a collector that changes training."""
    made = measured()
    spoiled = tuple(
        replace(pair, losses_equal=False) if "pipeline" in pair.first.on else pair for pair in made.pairs
    )
    difference = "step 40 (group 1 of the cycle, on: pipeline): loss 2.2500001, was 2.25 at step 12"
    return receipt(
        replace(made, pairs=spoiled, difference=difference),
        unfit=["GPU 0 was throttled after measuring: hardware thermal slowdown"],
        after=state(91, ("hardware thermal slowdown",)),
    )


def incomplete() -> Receipt:
    """The run crashed after a few pairs; nothing was counted."""
    crashed = "trainer crashed after 4 pairs with pipeline on: RuntimeError: out of memory"
    made = replace(measured(pairs=4), faults=(crashed,), stopped="crash", minutes=0.1)
    found = receipt(made, counted={}, throughput=None, before=None, after=None)
    return replace(found, commit=Commit("", dirty=True))


def gate() -> Receipt:
    """Head is 2% slower than base and launches one more operation in each step."""
    pairs = []
    for number in range(56):
        halves = [Segment((), 1, 1000, 0.1), Segment(("head",), 1, 1000, 0.102)]
        first, second = halves if number % 3 else halves[::-1]
        pairs.append(
            Pair(number, Layer.PATH, Question.EACH, first, second, process=number // 8, losses_equal=True)
        )
    place = CountedPlace(
        "operation", "drafter/0", "dflash/pipeline/drafter_worker.py:97 step (operation)", 4, 4
    )
    found = {
        "base": ExactCounts("base", 4, True, 0, 4000, 8, 0, ways=("modes",)),
        "head": ExactCounts("head", 4, True, 0, 4004, 8, 0, places=(place,), ways=("modes",)),
    }
    added: dict[str, int | None] = {"syncs": 0, "operations": 4, "copies": 0, "allocations": 0}
    judgement = judge_gate(estimate(1.96, 1.52, 2.39, n=7), 1.0, minutes=8.0, launches=7, added=added)
    side = {"step_p50_ms": 110.2, "step_p99_ms": 131.0, "peak_memory_bytes": 61_000_000_000}
    slow = side | {"tokens_per_second": 13931.0, "step_p50_ms": 112.3, "step_p99_ms": 140.5}
    sides = {"base": side | {"tokens_per_second": 14210.5}, "head": slow}
    return Receipt(
        command="gate",
        commit=replace(COMMIT, dirty=True, diff_hash="feedbeef00112233"),
        machine=MACHINE,
        config=CONFIG,
        pairs=tuple(pairs),
        losses_equal=True,
        collectors=(),
        all=judgement.all,
        throughput=Throughput(13931.0, 13880.0, 13982.0),
        baseline=BaselineView("not-used"),
        pipeline_efficiency=None,
        verdict=judgement.verdict,
        exit_code=judgement.exit_code,
        created="2026-11-29T12:00:00Z",
        headline=judgement.headline,
        collector_budget_percent=1.0,
        reasons=judgement.reasons,
        accepted=("losses are close, not equal (0.1% allowed): loss of step 3 differs by 0.002%",),
        seconds_per={Layer.PATH: 1.0},
        minutes=8.0,
        counts=found,
        before=state(48),
        after=state(61),
        subject="trainer",
        options={"base": "HEAD^1", "seed": 0, "minutes": 10.0, "launches": 7, "stopped": "time"},
        extra={
            "base": {"commit": "fedcba9876543210fedcba9876543210fedcba98"},
            "sides": sides,
            "notes": [],
            "compared_steps": 12,
        },
    )


def no_base() -> Receipt:
    """The base commit is older than the harness."""
    reason = (
        "base 0011223344 predates the harness (it has no bench/gate_worker.py): there is nothing to compare "
        "with"
    )
    judgement = judge_gate(None, 1.0, minutes=0.0, launches=0, incomplete=[reason])
    return replace(
        gate(),
        pairs=(),
        counts={},
        losses_equal=None,
        throughput=None,
        all=judgement.all,
        verdict=judgement.verdict,
        exit_code=judgement.exit_code,
        headline=judgement.headline,
        reasons=judgement.reasons,
        accepted=(),
        minutes=0.0,
        extra={"base": {"commit": ""}, "sides": {}, "notes": []},
    )


SCENES = {
    scene.__name__: scene for scene in (within, unresolved, slower, over, invalid, incomplete, gate, no_base)
}
