"""Segments and measurements made up for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from bench.measure.plan import make_arms, rounds
from bench.records.receipt import BaselineView, Receipt
from bench.records.types import (
    Arm,
    Commit,
    ConfigRef,
    ExactCounts,
    Interval,
    Machine,
    Measurement,
    Segment,
)
from bench.statistics.analysis import analyse
from bench.statistics.contrasts import Rounds
from bench.statistics.verdict import judge

COLLECTORS = ("profile", "pipeline")


def segment(
    arm: str, round_: int, seconds: float | list[float], order: int = 0, phase: int = 0, process: int = 0
) -> Segment:
    """One segment of 100 tokens a step; a list gives the step times."""
    steps = tuple(seconds) if isinstance(seconds, list) else ()
    return Segment(
        arm=arm,
        round=round_,
        order=order,
        steps=len(steps) or 1,
        tokens=100 * (len(steps) or 1),
        seconds=sum(steps) if steps else float(seconds),  # type: ignore[arg-type]
        step_seconds=steps,
        phase=phase,
        losses_digest="same",
        process=process,
    )


def counts(arms: tuple[Arm, ...], **rises: int) -> dict[str, ExactCounts]:
    """Clean counts of every arm; `profile=2` adds two syncs wherever that collector is on."""
    found = {}
    for arm in arms:
        syncs = sum(count for name, count in rises.items() if name in arm.collectors)
        found[arm.name] = ExactCounts(arm.name, 8, True, syncs, 4000, 16, 0, ways=("dispatch",))
    return found


def measurement(
    costs: Mapping[str, float] | None = None,
    *,
    collectors: tuple[str, ...] = COLLECTORS,
    rounds_: int = 12,
    noise: float = 0.002,
    seed: int = 0,
    cycle: int = 8,
) -> Measurement:
    """A clean run of all arms; `costs`: log cost of a collector wherever it is on."""
    costs = costs or {}
    rng = np.random.default_rng(seed)
    arms = make_arms(collectors)
    base = rng.uniform(0.05, 0.15, cycle)
    segments = []
    for number, order in zip(range(rounds_), rounds(arms, seed), strict=False):
        for place, arm in enumerate(order):
            cost = sum(costs.get(name, 0.0) for name in arm.collectors)
            steps = base * np.exp(cost + rng.normal(0.0, noise, cycle))
            segments.append(segment(arm.name, number, [float(s) for s in steps], place))
    return Measurement(
        subject="made up",
        cycle=cycle,
        arms=arms,
        collectors=collectors,
        segments=tuple(segments),
        accounted_percent=dict.fromkeys((*collectors, "all"), 0.01),
        counts=counts(arms),
        rounds=rounds_,
    )


def interval(percent: float, low: float, high: float, *, n: int = 12, p: float | None = None) -> Interval:
    """An interval as printed; its spread is the one that gives these bounds."""
    from scipy import stats

    from bench.records.types import log_ratio
    from bench.statistics.intervals import NOMINAL

    half = (log_ratio(high) - log_ratio(low)) / 2
    spread = 100.0 * half / float(stats.t.isf(NOMINAL, n - 1)) * n**0.5
    flip = (0.001 if low > 0 else 0.4) if p is None else p
    return Interval(
        percent, low, high, mde=half * 2, n=n, spread=spread, sign_flip_p=flip, plain_percent=percent
    )


def made_receipt(
    machine: Machine,
    config: ConfigRef,
    commit: Commit,
    costs: Mapping[str, float] | None = None,
    *,
    speed: float = 1.0,
    noise: float = 0.001,
    collectors: tuple[str, ...] = COLLECTORS,
    **changes: Any,
) -> Receipt:
    """The receipt of a made-up run, judged as a real one is. `speed` multiplies tokens per second."""
    made = measurement(costs, collectors=collectors, noise=noise)
    faster = [
        replace(s, seconds=s.seconds / speed, step_seconds=tuple(t / speed for t in s.step_seconds))
        for s in made.segments
    ]
    made = replace(made, segments=tuple(faster), **changes)
    analysis = analyse(made)
    found = judge(analysis)
    return Receipt(
        command="overhead",
        commit=commit,
        machine=machine,
        config=config,
        arms={arm.name: tuple(s for s in made.segments if s.arm == arm.name) for arm in made.arms},
        losses_equal=analysis.losses_equal,
        collectors=found.collectors,
        all=found.all,
        throughput=analysis.throughput,
        baseline=BaselineView("missing"),
        pipeline_efficiency=None,
        verdict=found.verdict,
        exit_code=found.exit_code,
        reasons=found.reasons,
        aa=analysis.aa,
        created="2026-11-29T00:00:00Z",
        subject=made.subject,
        cycle=made.cycle,
    )


def made_rounds(
    plain: np.ndarray, step: np.ndarray | None = None, tail: np.ndarray | None = None, processes: int = 1
) -> Rounds:
    """Rounds with these contrasts, cut evenly into processes."""
    n = len(plain)
    none = np.empty(0)
    process = np.arange(n) * processes // n
    return Rounds(
        process,
        plain,
        none if step is None else step,
        (np.zeros(n) if tail is None else tail) if step is not None else none,
    )
