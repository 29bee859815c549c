"""Each record, wait, query and release of the pipeline is needed, and its absence is found."""

from __future__ import annotations

import pytest

from dflash.pipeline.supervisor import WorkerFailed
from dflash.pipeline.watchdog import WorkerHung
from steptime.simulate import Misuse, Race
from tests.pipeline.simulated.calls import Call, watching
from tests.pipeline.simulated.parts import devices, simulated
from tests.waiting import HANG_S

pytestmark = pytest.mark.timeout(600)

LAYOUTS = {
    "in place": (*devices(1, 1, together=True), "objective.kind=kd"),
    "peer": (*devices(1, 2), "objective.kind=kd", "train.checkpoint_every=2"),
    "pinned": (*devices(1, 1), "queue.hand_over=pinned", "objective.kind=kd"),
}
STEPS = ("queue.capacity=1", "train.steps=6", "observe.collectors=[]")


LATE, SOON = 20, 0
"""Queries before an event fires. Late: hosts learn nothing from queries. Soon: they learn it while they
run."""


def run(tmp_path, layout: str, without: Call | None, name: str, queries: int = LATE) -> dict[Call, int]:
    patience = f"train.hang_s={HANG_S if without is None else 3}"
    with watching(without) as seen:
        simulated(tmp_path, *LAYOUTS[layout], *STEPS, patience, name=name, queries=queries)
    return seen


def what_finds_it(tmp_path, layout: str, call: Call, name: str) -> str:
    """The fault that ends the run without the call; the empty string when nothing does."""
    for queries in (LATE, SOON):
        try:
            run(tmp_path, layout, call, f"{name} {queries}", queries)
        except WorkerFailed as failed:
            error = failed.failure.error
            assert isinstance(error, (Race, Misuse, WorkerHung)), error
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.thorough
@pytest.mark.fault
@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_any_one_call_the_run_ends_with_a_fault(tmp_path, layout):
    calls = run(tmp_path, layout, None, "whole")
    kinds = {call.kind for call in calls}
    assert kinds == {"record", "wait", "query", "release"}
    silent = [
        str(call)
        for number, call in enumerate(calls)
        if not what_finds_it(tmp_path, layout, call, f"without {number}")
    ]
    assert silent == []
