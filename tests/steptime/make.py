"""Pairs, runs and receipts made up for tests, judged by the code that judges real ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from steptime.measure.evidence import evidence
from steptime.measure.run import Asked, Measured
from steptime.records.costs import Estimate, LayerCosts, SwitchCost
from steptime.records.pairs import ALL, PLACEBO, Layer, Pair
from steptime.records.receipt import BaselineView, Receipt, SegmentLengths, SentinelTimes
from steptime.records.types import OFF, Commit, ConfigRef, ExactCounts, Machine, Verdict
from steptime.statistics.judging import Budgets, Judgement, judge
from steptime.statistics.observed import Observations, observe
from steptime.subjects.protocol import SubjectResult
from tests.steptime.statistics.pairs import SECONDS_PER, STEP_S, pairs_of

COLLECTORS = ("profile", "pipeline")


def counts(switches: Sequence[str] = COLLECTORS, **rises: int) -> dict[str, ExactCounts]:
    """Clean counts of all off, of each switch and of all; `profile=2` adds two syncs where that switch is
    on."""
    on: dict[str, Sequence[str]] = {OFF: (), **{name: (name,) for name in switches}, ALL: switches}
    return {
        arm: ExactCounts(
            arm, 8, True, sum(rises.get(name, 0) for name in names), 4000, 16, 0, ways=("dispatch",)
        )
        for arm, names in on.items()
    }


def measured(
    costs: Mapping[str, float] | None = None,
    *,
    collectors: tuple[str, ...] = COLLECTORS,
    pairs: int = 150,
    noise: float = 0.002,
    seed: int = 0,
    speed: float = 1.0,
    layers: Sequence[Layer] = tuple(Layer),
    control: tuple[float, float] | None = None,
) -> Measured:
    """A clean run; `costs`: share of the time of a collector, in each layer alike. `speed` multiplies tokens
    per second; `control` as in `pairs_of`."""
    rng = np.random.default_rng(seed)
    halves = rng.normal(0.0, noise, 2 * pairs)
    found = pairs_of(collectors, halves, costs or {}, seed, layers=layers, control=control)
    return Measured(
        subject="made up",
        asked=Asked(collectors, 1.0, 240.0, seed),
        pairs=tuple(_faster(replace(pair, losses_equal=True), speed) for pair in found),
        seconds_per={layer: SECONDS_PER[layer] for layer in layers},
        result=SubjectResult(accounted_percent=dict.fromkeys((*collectors, ALL), 0.01)),
        minutes=4.0,
        stopped="clear",
    )


def _faster(pair: Pair, speed: float) -> Pair:
    first, second = (
        replace(half, seconds=half.seconds / speed, step_seconds=(half.seconds / speed,))
        for half in (pair.first, pair.second)
    )
    return replace(pair, first=first, second=second)


def judged(
    made: Measured,
    counted: Mapping[str, ExactCounts] | None = None,
    unfit: Sequence[str] = (),
) -> tuple[Observations, Judgement]:
    """What a run shows and the verdict on it; `counted` None: clean counts."""
    budgets = Budgets()
    found = observe(made.pairs, made.asked.switches, made.seconds_per, budgets, redraws=499)
    counted = counts(made.asked.switches) if counted is None else counted
    return found, judge(evidence(made, found, counted), budgets, unfit)


def receipt_of(
    made: Measured,
    machine: Machine,
    config: ConfigRef,
    commit: Commit,
    *,
    counted: Mapping[str, ExactCounts] | None = None,
    unfit: Sequence[str] = (),
    **changes: Any,
) -> Receipt:
    """The receipt of a made-up run."""
    found, judgement = judged(made, counted, unfit)
    receipt = Receipt(
        command="overhead",
        commit=commit,
        machine=machine,
        config=config,
        pairs=made.pairs,
        losses_equal=made.losses_equal,
        collectors=judgement.collectors,
        all=judgement.all,
        throughput=made.throughput,
        baseline=BaselineView("missing"),
        pipeline_efficiency=None,
        verdict=judgement.verdict,
        exit_code=judgement.exit_code,
        created="2026-11-29T00:00:00Z",
        headline=judgement.headline,
        reasons=judgement.reasons,
        accepted=judgement.accepted,
        placebo=found.placebo and SwitchCost(PLACEBO, found.placebo, 0.5, Verdict.UNRESOLVED),
        control=found.control,
        cross_check_percent=found.squares,
        seconds_per=made.seconds_per,
        lengths=SegmentLengths({Layer.PATH: 1, Layer.TICK: 2, Layer.FLUSH: 3}),
        minutes=made.minutes,
        sentinel=SentinelTimes({"cpu": 0.5}, {"cpu": 0.5}),
        counts=dict(counts(made.asked.switches) if counted is None else counted),
        subject=made.subject,
    )
    return replace(receipt, **changes)


def made_receipt(
    machine: Machine,
    config: ConfigRef,
    commit: Commit,
    costs: Mapping[str, float] | None = None,
    *,
    speed: float = 1.0,
    noise: float = 0.001,
    collectors: tuple[str, ...] = COLLECTORS,
    faults: tuple[str, ...] = (),
    **changes: Any,
) -> Receipt:
    """The receipt of a made-up run of the path alone at `speed` times 1,000 tokens per second, with `changes`
    to the receipt."""
    scale = speed * STEP_S
    made = measured(costs, collectors=collectors, noise=noise, speed=scale, layers=(Layer.PATH,), pairs=60)
    made = replace(made, faults=faults)
    return receipt_of(made, machine, config, commit, **changes)


def estimate(percent: float, low: float, high: float, *, n: int = 400) -> Estimate:
    """An estimate as printed; its p-values are those of normal noise with these bounds."""
    from scipy.stats import norm

    error = (high - low) / 3.29
    return Estimate(
        percent,
        low,
        high,
        standard_error=error,
        mde=3.29 * error,
        p_slower=float(norm.sf(percent / error)),
        p_faster=float(norm.cdf(percent / error)),
        p_over=float(norm.sf((percent - 1.0) / error)),
        p_under=float(norm.cdf((percent + 1.0) / error)),
        n=n,
        layers=LayerCosts(path_percent=percent),
    )
