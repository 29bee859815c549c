"""Tokens per second with everything off, with all on and with each collector on, as benchmarks. Each fails on
its own: over budget, slower than the baseline, invalid."""

from __future__ import annotations

from typing import Any

import pytest

from bench.pytest_benchmark import replay
from steptime.baselines import comparing
from steptime.baselines.recording import session_of
from steptime.records.receipt import Receipt
from steptime.records.types import OFF, Verdict

CLOCK = replay.ReplayClock()


@pytest.mark.benchmark(timer=CLOCK, group="tokens per second")
def test_tokens(
    benchmark: Any, collector: str, receipt: Receipt, known: Any, request: pytest.FixtureRequest
) -> None:
    """Replay the segments, then judge the run itself, the collector's cost, and the stored baseline."""
    samples = replay.samples(receipt, collector)
    if not samples:
        pytest.fail(f"{collector!r} was not measured: {'; '.join(receipt.reasons)}", pytrace=False)
    remaining = iter(samples)
    benchmark.pedantic(
        lambda: CLOCK.advance(next(remaining, 0.0)), setup=CLOCK.reset, rounds=len(samples), iterations=1
    )
    benchmark.extra_info.update(replay.extra_info(receipt, collector))
    _judge_run(receipt)
    _judge_cost(receipt, collector, strict=request.config.option.bench_strict)
    _judge_baseline(receipt, known, collector)


def _judge_run(receipt: Receipt) -> None:
    if receipt.verdict in (Verdict.INVALID, Verdict.NO_BASELINE):
        pytest.fail(f"{receipt.verdict.value}: {'; '.join(receipt.reasons)}", pytrace=False)


def _judge_cost(receipt: Receipt, collector: str, *, strict: bool) -> None:
    cost = replay.cost_of(receipt, collector)
    if cost is None or cost.verdict is Verdict.WITHIN:
        return
    text = f"{cost.name}: {cost.verdict.value}: {'; '.join(cost.reasons)}\n{replay.cost_table([cost])}"
    if strict or cost.verdict in (Verdict.OVER, Verdict.INVALID):
        pytest.fail(text, pytrace=False)


def _judge_baseline(receipt: Receipt, known: Any, collector: str) -> None:
    """The stored figure is that of `off`; what is on is judged by its cost, in the same run."""
    if collector != OFF or known.baseline is None or receipt.throughput is None:
        return
    moved = comparing.machine_moved(known.baseline, [session_of(receipt)])
    if moved:
        pytest.fail(f"invalid: {moved}", pytrace=False)
    found = comparing.compare(known.baseline, [receipt.throughput])
    table = replay.regression(found, known.baseline, known.baseline_path)
    if table and found.verdict is Verdict.OVER:
        pytest.fail(table, pytrace=False)
    if table:
        pytest.xfail(table)


def test_complete(receipt: Receipt, known: Any, missing: list[str]) -> None:
    """Pairs were taken, and every test that the baseline knows was measured."""
    assert receipt.pairs, f"no pair was measured: {'; '.join(receipt.reasons)}"
    assert not missing or known.incomplete_allowed, f"of the baseline, not measured: {', '.join(missing)}"


def test_resolved(receipt: Receipt) -> None:
    """What the run could not tell: expected on a noisy machine, never counted as passed.

    With `--bench-strict` the collectors' own tests fail.
    """
    open_costs = [
        c
        for c in (*receipt.collectors, receipt.all)
        if c and c.verdict in (Verdict.SLOWER, Verdict.UNRESOLVED)
    ]
    if open_costs:
        pytest.xfail(f"not resolved:\n{replay.cost_table(open_costs)}")
