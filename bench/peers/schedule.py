"""How near the schedule comes to its bound: the pipeline's own threads, queue, buffers, exchange and plan, on
devices whose kernels take the time they are told.

    python -m bench.peers.schedule [--steps N] [--case TEXT]

Target workers, drafter workers, prefetcher, queue, buffers, hand-over, gradient exchange and epoch plan are
the trainer's. They run on a virtual clock (`steptime/simulate/virtual_threads.py`), one at a time, always in
the same order. Models are stubs that enqueue one kernel of a known time on their worker's stream; events
carry that stream's time, and a host too far ahead of its device waits, as CUDA's launch queue makes it.

The bound of a side is its devices, always busy, with equal shares for the drafters of a step: targets do
batches at the sum of their speeds, drafters at their number times the slowest one's speed. The schedule's
rate is over the lower bound, behind the first steps. Left out: copies between devices take no time, the
interpreter lock, jitter, checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from tabulate import tabulate

from bench.peers.timed_devices import TimedDevice
from dflash.config import TrainConfig
from dflash.data import prefetch
from dflash.data.batch import Batch, BatchSpec
from dflash.data.plan import EpochPlan
from dflash.data.prefetch import BatchPrefetcher
from dflash.device import Device
from dflash.observe.recorder import WorkerRecorder
from dflash.pipeline import exchange, hidden_queue
from dflash.pipeline.drafter_worker import DrafterWorker
from dflash.pipeline.exchange import GradientExchange
from dflash.pipeline.hand_over import Receiver
from dflash.pipeline.hidden_queue import SharedHiddenStateQueue
from dflash.pipeline.scalars import LateScalars
from dflash.pipeline.target_worker import TargetWorker
from steptime.simulate.virtual_threads import VirtualTime

BUCKETS = (512, 1024, 1536, 2048, 2560, 3072)
LEAST = 0.98
"""Share of the bound below which the queue is at fault."""


@dataclass(frozen=True)
class Case:
    """A layout and the times of its kernels.

    Attributes:
        lengths: of samples, drawn evenly; each is a batch of its own.
        target_ms, drafter_ms: of a batch of 1,000 tokens; kernels take time in proportion to the length.
        optimizer_ms, host_ms: of a step; of the host to enqueue a pass.
        slow_target, slow_drafter: by how much the last one of a role is slower.
        accumulation: batches of each drafter in a step.
    """

    name: str
    targets: int = 5
    drafters: int = 3
    lengths: tuple[int, ...] = BUCKETS
    target_ms: float = 100.0
    drafter_ms: float = 60.0
    optimizer_ms: float = 5.0
    host_ms: float = 3.0
    slow_target: float = 1.0
    slow_drafter: float = 1.0
    accumulation: int = 1
    capacity: int = 30
    ready: int = 10
    ordered: bool = False
    prefetch: int = 16
    seed: int = 0

    def speeds(self, role: str) -> list[float]:
        """Of each worker of a role; 1 is the usual one."""
        count, slow = (
            (self.targets, self.slow_target) if role == "target" else (self.drafters, self.slow_drafter)
        )
        return [1.0] * (count - 1) + [1.0 / slow]


PACES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("targets slower", {"drafter_ms": 40.0}),
    ("drafters slower", {"drafter_ms": 90.0}),
    ("even", {"drafter_ms": 58.0}),
)
CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("one length", {"lengths": (2048,)}),
    ("six lengths", {}),
    ("six lengths, accumulation 8", {"accumulation": 8}),
    ("six lengths, slow target", {"slow_target": 1.5}),
    ("six lengths, slow drafter", {"slow_drafter": 1.5}),
)
CASES = tuple(
    Case(f"{order}, {side}, {what}", ordered=order == "ordered", **pace, **change)
    for order in ("mixed", "ordered")
    for side, pace in PACES
    for what, change in CHANGES
)


# -- what stands for models ----------------------------------------------------------------------------------


class TimedTarget:
    """A target of hidden size 1 and one tap."""

    def __init__(self, device: TimedDevice, case: Case) -> None:
        self.embedding, self.layer_ids = torch.zeros(1, 1), (0,)
        self._device, self._case = device, case

    def taps(self, ids: torch.Tensor, documents: object = None) -> tuple[torch.Tensor]:
        self._device.launch(self._case.target_ms * ids.numel() / 1e3, self._case.host_ms)
        return (torch.zeros(*ids.shape, 1),)


def timed_replica(device: TimedDevice, index: int, case: Case) -> Any:
    """A drafter of one parameter: a third of its time is forward, the rest backward."""

    def forward_loss(batch: Batch, features: object, last: object) -> tuple[Any, torch.Tensor]:
        whole_ms = case.drafter_ms * batch.padded_tokens / 1e3
        device.launch(whole_ms / 3, case.host_ms)
        return SimpleNamespace(backward=lambda: device.launch(whole_ms * 2 / 3, case.host_ms)), torch.zeros(1)

    def optimizer_step(rate: float, scale: float) -> torch.Tensor:
        device.launch(case.optimizer_ms, case.host_ms)
        device.work_s.append(0.0)
        return torch.zeros(())

    flat = SimpleNamespace(
        grad=torch.zeros(case.drafters), zero_grad=lambda: None, end_micro_batch=lambda last: None
    )
    optimizer = SimpleNamespace(step=optimizer_step)
    return SimpleNamespace(
        index=index,
        device=device,
        forward_loss=forward_loss,
        flat=flat,
        optimizer=optimizer,
        nominal_weight=1.0,
    )


def blank_batch(spec: BatchSpec) -> Batch:
    """A batch of which only the length counts."""
    nothing, tokens = torch.zeros(1, 1), len(spec.sample_ids) * spec.bucket
    known: dict[str, Any] = {
        **dict.fromkeys(("anchors", "keep", "labels", "weights", "document_start"), nothing),
        **dict.fromkeys(("loss_tokens", "supervised_slots"), 0),
        **dict.fromkeys(("tokens", "padded_tokens"), tokens),
    }
    ids = torch.zeros(len(spec.sample_ids), spec.bucket, dtype=torch.int64)
    lengths = (spec.bucket,) * len(spec.sample_ids)
    return Batch(spec=spec, input_ids=ids, documents=None, weight_sum=1.0, lengths=lengths, **known)


# -- one run -------------------------------------------------------------------------------------------------


@dataclass
class Schedule:
    """What a run leaves.

    Attributes:
        ends_s: for each step, when its slowest drafter was done.
    """

    case: Case
    devices: dict[str, list[TimedDevice]] = field(default_factory=dict)
    ends_s: list[float] = field(default_factory=list)

    @property
    def share_of_bound(self) -> float:
        """Rate over the lower of the two sides' bounds."""
        return max(self.targets_busy, self.drafters_busy)

    @property
    def window(self) -> tuple[int, int]:
        """The steps that count: not those of the first eighth, in which the queue fills, nor those of the
        last, in which the targets have nothing left to do."""
        steps = len(self.ends_s)
        return max(1, steps // 8), steps - max(1, steps // 8)

    @property
    def seconds(self) -> float:
        first, end = self.window
        return self.ends_s[end - 1] - self.ends_s[first - 1]

    @property
    def targets_busy(self) -> float:
        """The rate of the targets' work over their bound: 1 when nothing ever waits."""
        first, end = self.window
        began_s, done_s = self.ends_s[first - 1], self.ends_s[end - 1]
        usual_s = sum(
            kernel.usual_s
            * max(0.0, min(done_s, kernel.done_s) - max(began_s, kernel.began_s))
            / (kernel.done_s - kernel.began_s)
            for device in self.devices["target"]
            for kernel in device.kernels
        )
        return usual_s / sum(self.case.speeds("target")) / self.seconds

    @property
    def drafters_busy(self) -> float:
        """Likewise the drafters', with even shares of each step's work."""
        speeds = self.case.speeds("drafter")
        return sum(map(sum, self._shares())) / len(speeds) / min(speeds) / self.seconds

    @property
    def drafters_busy_as_planned(self) -> float:
        """Likewise with the shares that they had: each step takes as long as its slowest drafter."""
        speeds = self.case.speeds("drafter")
        return (
            sum(max(s / v for s, v in zip(step, speeds, strict=True)) for step in self._shares())
            / self.seconds
        )

    def _shares(self) -> Iterator[tuple[float, ...]]:
        """For each step of the window, each drafter's work on a usual device, seconds."""
        for step in range(*self.window):
            yield tuple(device.work_s[step] for device in self.devices["drafter"])


class Run:
    """The trainer's parts on a virtual clock.

    Args:
        queue: makes the queue in place of the trainer's, for planted faults.
    """

    def __init__(self, case: Case, steps: int, queue: type[SharedHiddenStateQueue]) -> None:
        self.case, self.time = case, VirtualTime()
        self.devices = {
            role: [
                TimedDevice(f"{role}:{index}", self.time, speed)
                for index, speed in enumerate(case.speeds(role))
            ]
            for role in ("target", "drafter")
        }
        self.ends_s = [0.0] * steps
        with self._on_virtual_time():
            self._build(steps, queue)

    def _on_virtual_time(self) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        for module in (hidden_queue, prefetch, exchange):
            stack.enter_context(mock.patch.object(module, "threading", self.time.threading))
        return stack

    def _build(self, steps: int, queue: type[SharedHiddenStateQueue]) -> None:
        case = self.case
        targets, drafters = self.devices["target"], self.devices["drafter"]
        lengths = np.random.default_rng(case.seed).choice(case.lengths, 4000)
        self.prefetcher = BatchPrefetcher(
            EpochPlan(lengths, sorted(case.lengths), 1, case.seed),
            blank_batch,
            case.prefetch,
            stop_index=steps * case.accumulation * case.drafters,
        )
        self.queue = queue(
            case.capacity,
            case.ready,
            ordered=case.ordered,
            drafters=case.drafters,
            targets=case.targets,
            per_step=case.accumulation,
            seed=case.seed,
        )
        self.exchange = GradientExchange(case.drafters)
        self.targets = [
            TargetWorker(
                index,
                TimedTarget(device, case),  # type: ignore[arg-type]
                device,
                WorkerRecorder("target", index, Device("cpu")),
                self.prefetcher,
                self.queue,
                buffers=-(-case.capacity // case.targets) + 1 + case.drafters,
                batch_size=1,
                max_length=max(case.lengths),
                dtype=torch.float32,
            )
            for index, device in enumerate(targets)
        ]
        config = TrainConfig(steps=steps, accumulation=case.accumulation)
        self.drafters = [self._drafter(index, device, config) for index, device in enumerate(drafters)]

    def _drafter(self, index: int, device: TimedDevice, config: TrainConfig) -> DrafterWorker:
        worker = DrafterWorker(
            timed_replica(device, index, self.case),
            WorkerRecorder("drafter", index, Device("cpu")),
            self.queue,
            self.exchange,
            Receiver(device, self.targets),
            LateScalars(device, 2, 64),
            config,
            arrived=lambda rows: None,
            hooks=None,
            stop=threading.Event(),
            checkpoint=lambda step, save: None,
        )
        step = worker.step

        def timed_step() -> bool:
            at, goes_on = worker.step_index, step()
            if worker.step_index > at:
                self.ends_s[at] = max(self.ends_s[at], device.current.done_s)
            return goes_on

        worker.step = timed_step  # type: ignore[method-assign]
        return worker

    def run(self) -> Schedule:
        """To the last step."""
        left = [len(self.drafters)]

        def live(worker: TargetWorker | DrafterWorker) -> None:
            with worker.device.active():
                worker.run()
            if isinstance(worker, DrafterWorker):
                left[0] -= 1
                if not left[0]:
                    self._end()

        with self._on_virtual_time():
            self.prefetcher.start()
            workers: list[TargetWorker | DrafterWorker] = [*self.targets, *self.drafters]
            for worker in workers:
                self.time.spawn(worker.device.name, partial(live, worker))
            self.time.run()
        return Schedule(self.case, self.devices, self.ends_s)

    def _end(self) -> None:
        self.queue.close()
        self.prefetcher.close()
        for worker in self.targets:
            worker.pool.close()


def simulate(
    case: Case, steps: int, queue: type[SharedHiddenStateQueue] = SharedHiddenStateQueue
) -> Schedule:
    """Run a case for so many optimizer steps."""
    return Run(case, steps, queue).run()


def table(found: Sequence[Schedule]) -> str:
    """Shares of the bounds, by case."""
    rows = [
        [one.case.name, *(f"{share:.1%}" for share in (judged(one), one.share_of_bound)), *_busy(one)]
        for one in found
    ]
    heads = ["case", "of the bound", "of even shares", "targets busy", "drafters busy"]
    return tabulate(rows, heads, "github", disable_numparse=True)


def _busy(one: Schedule) -> tuple[str, str]:
    return f"{one.targets_busy:.0%}", f"{one.drafters_busy:.0%}"


def judged(one: Schedule) -> float:
    """The share of the bound that the queue answers for: in the plan's order it has no choice who draws
    what."""
    return max(one.targets_busy, one.drafters_busy_as_planned) if one.case.ordered else one.share_of_bound


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; exit code 1 when a case is under 98%."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers.schedule", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--batches", type=int, default=1200, help="batches of each case")
    parser.add_argument("--case", default="", help="only cases with this in their name")
    asked = parser.parse_args(arguments)
    cases = [case for case in CASES if asked.case in case.name]
    found = [simulate(case, max(8, asked.batches // (case.drafters * case.accumulation))) for case in cases]
    if not found:
        parser.error(f"--case {asked.case!r}: no case has it in its name")
    sys.stdout.write(table(found) + "\n")
    under = [one.case.name for one in found if judged(one) < LEAST]
    sys.stdout.write(f"{len(under)} of {len(found)} cases under {LEAST:.0%} of the bound\n")
    return int(bool(under))


if __name__ == "__main__":
    sys.exit(main())
