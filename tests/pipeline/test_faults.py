"""A worker that raises ends the run within seconds with its own traceback; nobody hangs; a monitor's fault
does not."""

from __future__ import annotations

import threading

import pytest

from dflash.pipeline.supervisor import WorkerFailed
from tests.pipeline.run import Hooks, losses, small_trainer
from tests.waiting import HANG_S, wait_until

pytestmark = [pytest.mark.timeout(2 * HANG_S), pytest.mark.fault]


class Planted(Exception):
    pass


def plant(*_arguments, **_named):
    raise Planted("planted here")


AHEAD = 10
"""Batches in the queue, prefetched and in hands, at most."""


def after(calls: int, real, trainer):
    """`real` for so many calls, then the fault; `trainer.at_fault` is the step that drafters were at."""
    count = [0]

    def call(*arguments, **named):
        count[0] += 1
        if count[0] > calls:
            trainer.at_fault = furthest(trainer)
            plant()
        return real(*arguments, **named)

    return call


def furthest(trainer) -> int:
    return max(worker.step_index for worker in trainer.drafter_workers)


def plant_in_target(trainer):
    worker = trainer.target_workers[0]
    worker._target.taps = after(2, worker._target.taps, trainer)
    return "target/0"


def plant_in_drafter(trainer):
    replica = trainer.replicas[-1]
    replica.optimizer.step = after(2, replica.optimizer.step, trainer)
    return f"drafter/{replica.index}"


def plant_in_prefetcher(trainer):
    trainer.prefetcher._collate = after(5, trainer.prefetcher._collate, trainer)
    return "prefetcher"


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["one", "several"])
@pytest.mark.parametrize("where", [plant_in_target, plant_in_drafter, plant_in_prefetcher])
def test_a_worker_that_raises_ends_the_run_with_its_traceback(tmp_path, where, workers):
    layout = (
        []
        if workers == "one"
        else ['target.devices=["cpu:0", "cpu:1"]', 'drafter.devices=["cpu:0", "cpu:1"]']
    )
    before = set(threading.enumerate())
    trainer = small_trainer(tmp_path, "train.steps=100000", *layout)
    role = where(trainer)
    with pytest.raises(WorkerFailed) as caught:
        trainer.run()
    trainer.observer.close()
    # The queues held some batches; a run that went on would be at step 100,000.
    assert furthest(trainer) <= trainer.at_fault + AHEAD
    assert caught.value.failure.role == role
    assert "in plant\n" in caught.value.failure.text()
    assert "planted here" in caught.value.failure.text()
    wait_until(lambda: set(threading.enumerate()) <= before)


@pytest.mark.slow
def test_a_monitor_that_raises_does_not_stop_training(tmp_path):
    ticks = []

    class UntilItTicks(Hooks):
        def after_step(self, step, tokens):
            wait_until(lambda: ticks)
            return True

    trainer = small_trainer(tmp_path, "observe.tick_s=0.01", "train.steps=30", hooks=UntilItTicks())

    def broken_tick(*_arguments, **_named):
        ticks.append(1)
        plant()

    trainer.observer._monitor.tick = broken_tick
    assert len(losses(trainer)) == 30


def test_a_worker_that_ignores_the_stop_is_named_with_its_stack(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dflash.pipeline.trainer._JOIN_S", 0.3)
    trainer = small_trainer(tmp_path, "train.steps=3")
    release = threading.Event()
    trainer.supervisor.spawn("stubborn", release.wait)
    join = trainer.supervisor.join

    def join_when_the_others_have_ended(timeout_s: float, but: str = "") -> list[str]:
        wait_until(lambda: not any(trainer.supervisor.running(role) for role in ("target", "drafter")))
        return join(timeout_s, but)

    monkeypatch.setattr(trainer.supervisor, "join", join_when_the_others_have_ended)
    try:
        with pytest.raises(WorkerFailed, match="did not stop: stubborn"):
            trainer.run()
    finally:
        release.set()
    trainer.observer.close()
    assert "worker stubborn did not stop within" in capsys.readouterr().err
