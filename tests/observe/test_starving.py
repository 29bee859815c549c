"""Starve the real trainer three ways: the dashboard's own numbers name the culprit each time.

Time is virtual. Whoever is slow waits until all the others have done what they can and stand still; only then
does the clock move on, and the monitor is ticked by hand. So every wait is as long as the slowness behind it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash.models import stack
from dflash.observe.bottleneck import find_bottleneck
from dflash.observe.collectors.host import STANDING
from dflash.observe.registry import COLLECTORS
from dflash.pipeline.trainer import Trainer
from tests.clock import Clock
from tests.pipeline.run import small_trainer
from tests.waiting import wait_until

PAUSE_S, BRIEF_S = 0.05, 0.005
STEPS = 40
BY_HAND = ("observe.tick_s=3600", "observe.flush_s=36000")
"""The monitor's own thread sleeps until the end."""


def slowed(call: Callable[..., Any], pause: Callable[[], object]) -> Callable[..., Any]:
    """The same call, with a pause before it."""

    def slow(*arguments: Any, **named: Any) -> Any:
        pause()
        return call(*arguments, **named)

    return slow


class Slowness:
    """Makes one side of a trainer slow, and the others brief."""

    def __init__(self, trainer: Trainer, clock: Clock) -> None:
        self.trainer, self.clock = trainer, clock
        self.queue, self.prefetcher = trainer.queue, trainer.prefetcher

    def target(self) -> None:
        self._targets(self._pause(lambda: self.drafters_wait() and self.prefetcher_rests()))
        self._drafters(self._brief)

    def drafter(self) -> None:
        self._drafters(self._pause(self.targets_cannot_hand_over))
        self._targets(self._brief)

    def prefetching(self) -> None:
        pause = self._pause(lambda: self.targets_wait() and self.drafters_wait())
        self.prefetcher._collate = slowed(self.prefetcher._collate, pause)
        self._targets(self._brief)
        self._drafters(self._brief)

    def hang(self, still: Callable[[], object]) -> None:
        """Five flush windows of 0.2 s, once `still`."""
        wait_until(still)
        for _ in range(5):
            self.clock.advance(0.2)
            self.trainer.observer._monitor.tick(last=True)

    def _targets(self, pause: Callable[[], object]) -> None:
        for worker in self.trainer.target_workers:
            worker._run_target = slowed(worker._run_target, pause)  # type: ignore[method-assign]

    def _drafters(self, pause: Callable[[], object]) -> None:
        for worker in self.trainer.drafter_workers:
            worker._micro_step = slowed(worker._micro_step, pause)  # type: ignore[method-assign]

    def _brief(self) -> None:
        self.clock.advance(BRIEF_S)

    def _pause(self, still: Callable[[], object]) -> Callable[[], object]:
        def pause() -> None:
            wait_until(still)
            self.clock.advance(PAUSE_S)
            self.trainer.observer._monitor.tick()

        return pause

    # -- who stands still ----------------------------------------------------------------------------

    def drafters_wait(self) -> bool:
        """What was there has been drawn, and each drafter has come back for more."""
        since = self.queue.counters.consumer_since_ns
        waiting = all(since.get(worker.index) for worker in self.trainer.drafter_workers)
        return self.queue.depth() == 0 and waiting

    def targets_wait(self) -> bool:
        waiting = self.prefetcher._filled._waiters  # type: ignore[attr-defined]
        return self.prefetcher.depth_now() == 0 and len(waiting) == len(self.trainer.target_workers)

    def targets_cannot_hand_over(self) -> bool:
        return self.queue.stands_full(len(self.trainer.target_workers)) or self.targets_ended()

    def targets_ended(self) -> bool:
        return not self.trainer.supervisor.running("target")

    def prefetcher_rests(self) -> bool:
        return self.prefetcher.stands_full() or not self.prefetcher.thread.is_alive()


def rows_of(trainer: Trainer) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (trainer.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def observed(folder: Path, clock: Clock, slow: Callable[[Slowness], None]) -> tuple[dict[str, float], str]:
    """Values and verdict of a whole run."""
    trainer = small_trainer(folder, f"train.steps={STEPS}", *BY_HAND, save_checkpoints=False)
    slow(Slowness(trainer, clock))
    trainer.run()
    summary = trainer.observer.close()
    assert summary.failed == {}
    assert rows_of(trainer)[-1]["values"]["bottleneck"] == summary.bottleneck
    return summary.values, summary.bottleneck


@pytest.mark.slow
def test_the_real_trainer_fills_every_key_that_needs_no_gpu(tmp_path: Path, clock: Clock) -> None:
    """A key in the registry that no code writes would stay an empty panel for ever."""
    two = ("target.devices=['cpu','cpu']", "drafter.devices=['cpu','cpu']")
    known = {"save_checkpoints": False, "rates": (("cpu", 1e9),)}
    trainer = small_trainer(tmp_path, "train.steps=12", *BY_HAND, *two, **known)
    slowness = Slowness(trainer, clock)

    def look() -> None:
        # The queue holds something whenever it is looked at.
        wait_until(lambda: trainer.queue.depth() or slowness.targets_ended())
        clock.advance(PAUSE_S)
        trainer.observer._monitor.tick(last=True)

    first = trainer.drafter_workers[0]
    first._micro_step = slowed(first._micro_step, look)  # type: ignore[method-assign]
    trainer.run()
    trainer.observer.close()
    written = {key for row in rows_of(trainer) if row["kind"] == "metrics" for key in row["values"]}
    metrics = [metric for collector in COLLECTORS for metric in collector.metrics]
    empty = [metric.key for metric in metrics if not any(metric.pattern.fullmatch(key) for key in written)]
    # This run never stands still for a look at tau; `test_collectors.py` has one that does.
    assert [key for key in empty if not key.startswith(("gpu/", "cuda/")) and key != STANDING] == []


@pytest.mark.slow
def test_a_slow_target(tmp_path: Path, clock: Clock) -> None:
    values, verdict = observed(tmp_path, clock, Slowness.target)
    assert verdict.startswith("bottleneck: target side, drafters idle")
    assert values["pipeline/consumer_wait_s"] == pytest.approx(STEPS * PAUSE_S)
    assert values["pipeline/producer_wait_s"] == 0.0
    assert values["pipeline/prefetch_fill_ratio"] > 0.5
    assert values["pipeline/hs_queue_fill_ratio"] == 0.0
    slow, quick = (values[f"{role}/0/capacity_tokens_per_second"] for role in ("target", "drafter"))
    assert slow < 0.2 * quick


@pytest.mark.slow
def test_a_slow_drafter(tmp_path: Path, clock: Clock) -> None:
    values, verdict = observed(tmp_path, clock, Slowness.drafter)
    assert verdict.startswith("bottleneck: drafter side, targets idle")
    ahead = 4 + 1  # in the queue, and with the drafter: the target has nothing left to hand over at the end
    assert values["pipeline/producer_wait_s"] == pytest.approx((STEPS - ahead) * PAUSE_S)
    assert values["pipeline/consumer_wait_s"] <= 2 * BRIEF_S, "for the first batch alone"
    assert values["pipeline/hs_queue_fill_ratio"] > 0.5
    slow, quick = (values[f"{role}/0/capacity_tokens_per_second"] for role in ("drafter", "target"))
    assert slow < 0.2 * quick


@pytest.mark.slow
def test_a_slow_prefetcher(tmp_path: Path, clock: Clock) -> None:
    values, verdict = observed(tmp_path, clock, Slowness.prefetching)
    assert verdict.startswith("bottleneck: data side (prefetcher)")
    assert values["pipeline/prefetch_fill_ratio"] == 0.0
    # Whether a target asks for the next batch before or after the drafter's brief step is its own affair.
    most = STEPS * (PAUSE_S + BRIEF_S)
    assert STEPS * PAUSE_S - 1e-6 <= values["target/0/wait_in_s"] <= most + 1e-6
    assert values["pipeline/consumer_wait_s"] == pytest.approx(most)


PLANTED: dict[str, Callable[[Trainer], tuple[Any, str]]] = {
    "target.model_forward": lambda trainer: (trainer.target_workers[0]._target, "taps"),
    "target.pack_hidden": lambda trainer: (trainer.target_workers[0], "_packed"),
    "drafter.forward": lambda trainer: (trainer.replicas[0].drafter, "forward"),
    "drafter.backward": lambda trainer: (stack._Pass, "backward"),
    "drafter.optimizer_step": lambda trainer: (trainer.replicas[0].optimizer, "step"),
    "target, outside its stages": lambda trainer: (trainer.target_workers[0], "_run_target"),
}
"""What to slow down so that a stage is slow."""


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("stage", PLANTED)
def test_a_slow_stage_is_named_with_its_share(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    trainer = small_trainer(tmp_path, "train.steps=20", *BY_HAND, save_checkpoints=False)
    slowness = Slowness(trainer, clock)
    side = "drafter" if stage.startswith("drafter") else "target"
    still = {
        "target": lambda: slowness.drafters_wait() and slowness.prefetcher_rests(),
        "drafter": slowness.targets_cannot_hand_over,
    }
    owner, name = PLANTED[stage](trainer)
    monkeypatch.setattr(owner, name, slowed(getattr(owner, name), slowness._pause(still[side])))
    (slowness._drafters if side == "target" else slowness._targets)(slowness._brief)
    trainer.run()
    verdict = trainer.observer.close().bottleneck
    told = re.fullmatch(rf"bottleneck: {side} side, \w+ idle \d+%; {re.escape(stage)}, (\d+)%", verdict)
    assert told is not None, verdict
    # All the time that passes but for the others' brief steps passes there.
    assert int(told[1]) >= 100 * PAUSE_S / (PAUSE_S + 2 * BRIEF_S)


def test_a_worker_that_hangs_is_seen_while_it_hangs(tmp_path: Path, clock: Clock) -> None:
    """The drafter waits for a target that does not come back: each tick shows the wait growing."""
    trainer = small_trainer(tmp_path, "train.steps=6", *BY_HAND, save_checkpoints=False)
    slowness = Slowness(trainer, clock)
    (worker,) = trainer.target_workers
    run_target = worker._run_target
    hung = []

    def hang_once(*arguments: Any) -> Any:
        if worker._recorder.batches == 3 and not hung:
            hung.append(True)
            slowness.hang(slowness.drafters_wait)
        return run_target(*arguments)

    worker._run_target = hang_once  # type: ignore[method-assign]
    trainer.run()
    trainer.observer.close()
    windows = [row["values"] for row in rows_of(trainer) if row["kind"] == "metrics"]
    assert [row["drafter/0/wait_in_s"] for row in windows[:-1]] == pytest.approx([0.2] * 5)
    assert find_bottleneck(windows[2], 0.2).drafters_idle == pytest.approx(1.0)


@pytest.mark.slow
def test_a_target_that_cannot_hand_over_is_seen_while_it_waits(tmp_path: Path, clock: Clock) -> None:
    """The drafter hangs and the queue fills up: the target's wait grows at each tick, not in one lump at its
    end."""
    settings = ("train.steps=14", *BY_HAND, "queue.capacity=1", "queue.hs_min_ready=1")
    trainer = small_trainer(tmp_path, *settings, save_checkpoints=False)
    slowness = Slowness(trainer, clock)
    (worker,) = trainer.drafter_workers
    micro_step = worker._micro_step

    def hang_once(*arguments: Any) -> Any:
        if worker.step_index == 3:
            slowness.hang(slowness.targets_cannot_hand_over)
        return micro_step(*arguments)

    worker._micro_step = hang_once  # type: ignore[method-assign]
    trainer.run()
    trainer.observer.close()
    windows = [row["values"] for row in rows_of(trainer) if row["kind"] == "metrics"]
    assert [row["target/0/wait_out_s"] for row in windows[:-1]] == pytest.approx([0.2] * 5)
