"""The real trainer under the step clock, in miniature."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import bench.subjects.trainer.harness as trainer_subject
from bench.subjects.trainer import stage_speed
from bench.subjects.trainer.harness import DrainedBarrier, harness_config, typical_window
from bench.subjects.trainer.kind import TrainerKind
from bench.subjects.trainer.pairs import PairTrainer
from dflash.config import Config
from dflash.data.batch import Batch
from dflash.data.plan import EpochPlan
from dflash.pipeline.drafter_worker import Replica
from dflash.pipeline.hidden_queue import HiddenBatch
from steptime.errors import UserError
from steptime.records.pairs import Request, Segment
from steptime.subjects.protocol import SubjectResult
from tests.clock import Clock
from tests.pipeline.run import small_config, small_trainer
from tests.waiting import HANG_S

OFF = Request(frozenset(), 4, 0)


def run(subject: PairTrainer, *requests: Request) -> tuple[list[Segment], SubjectResult]:
    taken: list[Segment] = []
    try:
        subject.open()
        return taken, subject.run_pairs(iter(requests), taken.append)
    finally:
        subject.close()


def test_the_harness_changes_only_what_replaying_needs(tmp_path: Path) -> None:
    config = small_config(tmp_path, "train.lr=0.01", "data.prefetch=4", "queue.capacity=4")
    found = harness_config(config)
    assert found.train.lr == found.train.weight_decay == 0.0
    assert found.queue.ordered
    assert found.queue.capacity == 1
    assert found.observe.wandb == "off"
    assert found.drafter == config.drafter
    assert found.target == config.target
    assert found.objective == config.objective
    assert found.data == config.data.model_copy(update={"prefetch": 2})


def test_several_workers_get_a_slot_each(tmp_path: Path) -> None:
    config = small_config(
        tmp_path, 'target.devices=["cpu:0", "cpu:1", "cpu:2"]', 'drafter.devices=["cpu:0", "cpu:1"]'
    )
    assert harness_config(config).queue.capacity == 3
    config = small_config(tmp_path, 'target.devices=["cuda:0", "cuda:1"]', 'drafter.devices=["cuda:2"]')
    assert harness_config(config).queue.capacity == 4


@pytest.mark.fault
def test_a_pipeline_that_never_stands_still_is_a_fault_and_not_a_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer_subject, "BARRIER_S", 0.05)
    stand = DrainedBarrier(3)
    with pytest.raises(RuntimeError, match="does not drain"):
        stand.wait(lambda: False, 0, threading.Event())
    with pytest.raises(RuntimeError, match="does not drain"):
        stand.wait(lambda: True, 1, threading.Event())
    stopping = threading.Event()
    stopping.set()
    stand.wait(lambda: False, 1, stopping)  # a run that ends is not waited for
    stand.stay(stopping)


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.timeout(HANG_S)
def test_drafters_that_stand_go_when_the_run_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_subject, "BARRIER_S", 10 * HANG_S)  # not by giving up
    subject = PairTrainer(small_config(tmp_path, 'drafter.devices=["cpu:0", "cpu:1"]'))

    def broken(segment: Segment) -> None:
        raise RuntimeError("planted: nobody takes the segment")

    subject.open()
    try:
        with pytest.raises(RuntimeError, match="planted: nobody takes the segment"):
            subject.run_pairs(iter([OFF]), broken)
    finally:
        subject.close()
    assert not [
        thread.name for thread in threading.enumerate() if thread.name.startswith(("drafter", "target"))
    ]


@pytest.mark.slow
@pytest.mark.fault
def test_a_worker_that_raises_ends_the_run_with_its_own_error(tmp_path: Path) -> None:
    subject = PairTrainer(small_config(tmp_path))

    def broken(step: int, tokens: int) -> bool:
        raise RuntimeError("planted: the step clock is broken")

    subject.after_step = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="planted: the step clock is broken") as caught:
        run(subject, OFF)
    assert caught.traceback[-1].name == "broken", "the worker's own traceback"


@pytest.mark.fault
def test_bad_settings_are_refused_before_anything_is_built(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config = config.model_copy(update={"drafter": config.drafter.model_copy(update={"hidden_size": 48})})
    with pytest.raises(UserError, match="hidden_size"):
        PairTrainer(config).open()
    with pytest.raises(UserError, match="did you mean 'item'"):
        PairTrainer(Config(), plants=("itme",))


@pytest.mark.slow
def test_stages_alone_give_the_pipeline_its_measure_and_leave_training_as_it_was(tmp_path: Path) -> None:
    plain = PairTrainer(small_config(tmp_path))
    timed = PairTrainer(small_config(tmp_path), time_stages=True)
    (taken, first), (_, second) = run(plain, OFF), run(timed, OFF)
    assert first.stage_tokens_per_second is None
    assert second.stage_tokens_per_second is not None
    assert second.stage_tokens_per_second > 0
    assert len(taken) == 1
    assert dict(first.losses)[8] == dict(second.losses)[8]


@pytest.mark.parametrize(("target_s", "drafter_s"), [(0.02, 0.05), (0.08, 0.05)])
def test_the_slower_stage_alone_is_the_measure(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, target_s: float, drafter_s: float
) -> None:
    trainer = small_trainer(tmp_path)
    (worker,) = trainer.target_workers
    hidden_states, train = worker.hidden_states, stage_speed._train
    batches: dict[int, int] = {}

    def slow_target(batch: Batch) -> HiddenBatch:
        clock.advance(target_s)
        batches[batch.spec.index] = batch.tokens
        return hidden_states(batch)

    def slow_drafter(replica: Replica, item: HiddenBatch) -> None:
        clock.advance(drafter_s)
        train(replica, item)

    monkeypatch.setattr(worker, "hidden_states", slow_target)
    monkeypatch.setattr(stage_speed, "_train", slow_drafter)
    found = stage_speed.slowest_stage(trainer, 3)
    trainer.observer.close()
    assert sorted(batches) == [0, 1, 2]
    assert found == pytest.approx(sum(batches.values()) / (3 * max(target_s, drafter_s)))


def test_the_window_of_the_plan_is_the_one_most_like_the_whole() -> None:
    lengths = np.random.default_rng(0).integers(5, 64, 200)
    plan = EpochPlan(lengths, (32, 64), 2, seed=1)
    start = typical_window(plan, lengths, 4)
    assert start == typical_window(plan, lengths, 4)

    def tokens(first: int, count: int) -> float:
        return float(np.mean([sum(lengths[list(plan.spec(first + i).sample_ids)]) for i in range(count)]))

    whole = tokens(0, 68)
    errors = [abs(tokens(first, 4) / whole - 1) for first in range(64)]
    assert errors[start] < np.median(errors)


@pytest.mark.slow
def test_a_trace_trains_for_real_and_repeats_itself(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    first, again = TrainerKind().trace(config, 5), TrainerKind().trace(config, 5)
    assert first == again
    assert [step for step, _, _ in first] == [0, 1, 2, 3, 4]
    assert len({loss for _, loss, _ in first}) == 5
    other = config.model_copy(update={"train": config.train.model_copy(update={"betas": (0.5, 0.9)})})
    assert TrainerKind().trace(other, 5)[:1] == first[:1]
    assert TrainerKind().trace(other, 5)[2:] != first[2:], (
        "an optimizer that does other work shows in the trace"
    )
