"""The schedule of the trainer's own threads on a virtual clock, held to its bound; queues that miss it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bench.peers import schedule
from bench.peers.schedule import CASES, LEAST, Case, Schedule, judged, simulate, table
from dflash.pipeline.hidden_queue import SharedHiddenStateQueue

BATCHES = 360
SLOW = Case("small", drafter_ms=90.0)


def run(case: Case, queue: type[SharedHiddenStateQueue] = SharedHiddenStateQueue) -> Schedule:
    return simulate(case, BATCHES // (case.drafters * case.accumulation), queue)


@pytest.mark.slow
@pytest.mark.parametrize("side", [{"drafter_ms": 40.0}, {"drafter_ms": 90.0}], ids=["targets", "drafters"])
@pytest.mark.parametrize(
    "change",
    [{}, {"accumulation": 8}, {"slow_target": 1.5}, {"slow_drafter": 1.5}, {"ordered": True}],
    ids=lambda change: next(iter(change), "mixed"),
)
def test_five_targets_and_three_drafters_reach_their_bound(side: dict, change: dict) -> None:
    assert judged(run(replace(SLOW, **side, **change))) >= LEAST


class RandomDraws(SharedHiddenStateQueue):
    """As the queue once drew: whichever batch, so drafters of a step wait for the one with the longest."""

    def _mixed(self, drafter: int) -> int:
        return random.Random(self.counters.get_count).choice(list(self._items))


class OneIsLeftOut(SharedHiddenStateQueue):
    """Drafter 0 gets the longest batch that waits, the others the shortest."""

    def _mixed(self, drafter: int) -> int:
        pick = min if drafter else max
        return pick(self._items, key=lambda index: self._items[index].batch.padded_tokens)


@pytest.mark.slow
def test_planted_draws_that_make_a_drafter_wait_miss_the_bound() -> None:
    assert judged(run(SLOW, RandomDraws)) < 0.8
    assert judged(run(SLOW, OneIsLeftOut)) < 0.7
    assert judged(run(replace(SLOW, accumulation=8), RandomDraws)) < 0.95


def test_a_planted_queue_of_one_misses_the_bound() -> None:
    even = replace(SLOW, drafter_ms=58.0, capacity=1, ready=0)
    assert judged(run(even)) < LEAST
    assert judged(run(replace(even, capacity=30, ready=10))) >= LEAST


def test_in_the_plans_order_the_plan_answers_for_uneven_shares() -> None:
    found = run(replace(SLOW, ordered=True))
    assert found.share_of_bound < 0.8
    assert judged(found) >= LEAST


def test_one_target_and_one_drafter_take_exactly_the_slower_ones_time() -> None:
    case = Case(
        "pair", targets=1, drafters=1, lengths=(1000,), optimizer_ms=0.0, host_ms=0.0, drafter_ms=60.0
    )
    found = simulate(case, 240)
    first, end = found.window
    assert found.seconds / (end - first) == pytest.approx(0.100)  # the target's 100 ms a batch
    assert found.targets_busy == pytest.approx(1.0)
    assert found.drafters_busy == pytest.approx(0.6)


def test_the_same_case_takes_the_same_turns() -> None:
    assert run(SLOW).ends_s == run(SLOW).ends_s


def test_a_case_under_the_bound_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(schedule, "CASES", (replace(SLOW, lengths=(2048,)),))
    assert schedule.main(["--batches", "90"]) == 0
    monkeypatch.setattr(schedule, "CASES", (replace(SLOW, capacity=1, ready=0, drafter_ms=58.0),))
    assert schedule.main(["--batches", "360"]) == 1
    assert "1 of 1 cases under 98% of the bound" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        schedule.main(["--case", "no such"])


def test_every_case_has_a_name_of_its_own_and_a_row() -> None:
    assert len({case.name for case in CASES}) == len(CASES) == 30
    assert "| small" in table([run(SLOW)])
