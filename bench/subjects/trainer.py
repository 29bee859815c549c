"""The real trainer as a subject: one resident run that replays a cycle of batches while its switches are thrown."""

from __future__ import annotations

import contextlib
import gc
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.records import Arm
from bench.stages import slowest_stage
from bench.subject import HostMarks, Marks, OnSegment, SegmentRequest, Stepper, SubjectResult, busy_wait
from dflash.config import Config
from dflash.data.plan import Plan
from dflash.device import Device
from dflash.types import BatchSpec

if TYPE_CHECKING:
    from dflash.observe.observer import Observer
    from dflash.pipeline.build import Inputs
    from dflash.pipeline.trainer import Trainer

CYCLE_STEPS = 4
"""Steps that make one cycle of batches. A segment holds whole cycles, so on a slow machine a long cycle makes long segments."""
WINDOWS = 64
"""Places in the plan that are looked at for a cycle that is like the whole."""
ENDLESS = 10_000_000
"""Steps of the run, which the plan ends."""
WAITING_PER_WORKER = {"cpu": 1, "cuda": 2}
"""Batches that may wait in the queue for each worker of the larger role. A deep queue lets a slow stage hide for as long as it
takes to run dry; a shallow one shows it at once. On CUDA the host runs ahead of its device, and needs one more to do so."""


def harness_config(config: Config) -> Config:
    """The user's config as the harness runs it.

    Ordered mode and a learning rate of 0, so that losses repeat bit for bit; no schedule, no checkpoints; a shallow queue, so
    that what slows any stage slows the whole within a few steps; JSONL as the only sink; all collectors off until a switch
    is thrown.
    """
    devices = (*config.target.devices, *config.drafter.devices)
    kind = "cuda" if any(name.startswith("cuda") for name in devices) else "cpu"
    workers = max(len(config.drafter.devices), len(config.target.devices))
    capacity = min(config.queue.capacity, max(workers, WAITING_PER_WORKER[kind] * workers))
    queue = {"ordered": True, "capacity": capacity, "hs_min_ready": min(config.queue.hs_min_ready, 1)}
    train = {"lr": 0.0, "weight_decay": 0.0, "warmup": 0.0, "steps": ENDLESS, "checkpoint_every": 0}
    observe = {"collectors": (), "terminal": "off", "wandb": "off", "tensorboard": False}
    return config.model_copy(
        update={
            "queue": config.queue.model_copy(update=queue),
            "train": config.train.model_copy(update=train),
            "observe": config.observe.model_copy(update=observe),
            "data": config.data.model_copy(update={"prefetch": min(config.data.prefetch, 2)}),
        }
    )


class TrainerSubject:
    """Builds the trainer once and hangs the step clock into drafter 0's step boundary.

    Args:
        config: the user's settings; measured as `harness_config(config)`.
        injected: names of collectors that lose a known share of each step.
        plant: a bad collector out of `bench.planted.PLANTED`.
        cycle: steps in the replayed cycle.
        time_stages: also time each stage alone, before the run.
    """

    def __init__(
        self,
        config: Config,
        *,
        injected: Mapping[str, float] | None = None,
        plant: str = "",
        cycle: int = CYCLE_STEPS,
        time_stages: bool = False,
    ) -> None:
        from bench.planted import make_plant
        from dflash.observe.registry import COLLECTORS

        self.name = "trainer"
        self.config = harness_config(config)
        self.cycle = cycle
        self.washout = self.config.queue.capacity
        self.warmup = max(8, 2 * cycle)
        self.devices = (*self.config.target.devices, *self.config.drafter.devices)
        self._injected = dict(injected or {})
        self._planted = make_plant(plant) if plant else None
        planted = (plant,) if plant else ()
        self._switched = tuple(collector.name for collector in COLLECTORS) + planted
        self.collectors = (*self._switched, *self._injected)
        self._cleanup = contextlib.ExitStack()
        self.trainer: Trainer | None = None
        self.observer: Observer | None = None
        self._tokens: list[int] = []
        self._stepper: Stepper | None = None
        self._time_stages = time_stages

    def open(self) -> None:
        """Read the data, build target, drafter, queue and observer; nothing runs yet."""
        from dflash.observe.observer import Observer
        from dflash.observe.roles import RoleMap
        from dflash.pipeline.build import prepare_inputs
        from dflash.pipeline.trainer import Trainer

        inputs = prepare_inputs(self.config)
        run_dir = Path(self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="dflash-bench-")))
        plan = self._cycle_plan(inputs)
        self.observer = Observer(self.config.observe, run_dir, RoleMap.from_config(self.config))
        self._cleanup.callback(self.observer.close)
        hooks = self if self._planted is None else self._planted.hooks(self)
        self.trainer = Trainer(inputs, run_dir, self.observer, plan=plan, hooks=hooks, save_checkpoints=False)
        if self._planted is not None:
            self._planted.install(self.trainer)

    def _cycle_plan(self, inputs: Inputs) -> Any:
        from dflash.data.plan import CyclePlan, EpochPlan

        data = self.config.data
        per_step = len(self.config.drafter.devices) * self.config.train.accumulation
        lengths, batches = inputs.dataset.lengths, self.cycle * per_step
        epochs = EpochPlan(lengths, data.buckets, data.batch_size, data.seed)
        plan = CyclePlan(_From(epochs, typical_window(epochs, lengths, batches)), batches)
        tokens = [sum(int(lengths[row]) for row in plan.spec(index).sample_ids) for index in range(batches)]
        self._tokens = [sum(tokens[step * per_step : (step + 1) * per_step]) for step in range(self.cycle)]
        return plan

    def run(self, requests: Iterator[SegmentRequest], on_segment: OnSegment) -> SubjectResult:
        """Train until the requests end. Raises what a worker raised."""
        from dflash.pipeline.supervisor import WorkerFailed

        trainer, observer = self.trainer, self.observer
        assert trainer is not None
        assert observer is not None
        device = trainer.replicas[0].device
        stage_tokens_per_second = slowest_stage(trainer, self.cycle) if self._time_stages else None
        self._stepper = self._make_stepper(requests, on_segment, device)
        gc.collect()
        gc.freeze()
        try:
            result = trainer.run()
        except WorkerFailed as failure:
            raise failure.failure.error from None
        finally:
            gc.unfreeze()
        summary = observer.close()
        return SubjectResult(
            losses=[(row.step, row.loss) for row in result.scalars],
            accounted_percent=summary.accounted_percent,
            stage_tokens_per_second=stage_tokens_per_second,
            peak_memory_bytes=peak_memory(device),
            notes=tuple(f"sink {name} dropped {count} rows" for name, count in summary.dropped.items() if count),
            faults=tuple(f"collector {name} switched itself off: {error}" for name, error in summary.failed.items()),
        )

    def _make_stepper(self, requests: Iterator[SegmentRequest], on_segment: OnSegment, device: Device) -> Stepper:
        delay: Callable[[int], int] = GpuDelay(device) if device.is_cuda else busy_wait
        marks: Marks = CudaMarks(device) if device.is_cuda else HostMarks()
        return Stepper(
            cycle=self.cycle,
            requests=requests,
            on_segment=on_segment,
            switch=self._throw,
            injected=self._injected,
            marks=marks,
            delay=delay,
            waits_on_host=not device.is_cuda,
            fence=self._fence if device.is_cuda else None,
        )

    def _throw(self, arm: Arm) -> None:
        observer = self.observer
        assert observer is not None
        for name in self._switched:
            observer.switch(name, name in arm.collectors)
        # Young objects only: everything older was frozen, so this is cheap, and no arm inherits another's garbage.
        gc.collect()

    def _fence(self) -> None:
        from dflash.observe.sync_guard import allowed_sync

        assert self.trainer is not None
        with allowed_sync("end of a measured segment"):
            for replica in self.trainer.replicas:
                replica.device.synchronize()

    # -- hooks of the trainer: drafter 0's thread -----------------------------------------------------------------------

    def after_backward(self, loss: Any, step: int) -> None:
        """Nothing here."""

    def after_step(self, step: int, tokens: int) -> bool:
        """Step boundary; False ends the run."""
        stepper = self._stepper
        assert stepper is not None
        if step >= self.warmup - 1:
            stepper(step, self._tokens[step % self.cycle])
        return not stepper.finished

    def close(self) -> None:
        """Stop the observer and remove the run's folder."""
        self._cleanup.close()
        self.trainer = self.observer = None


@dataclass(frozen=True, slots=True)
class _From:
    """A plan from place `start` on."""

    inner: Plan
    start: int

    def spec(self, index: int) -> BatchSpec:
        return replace(self.inner.spec(self.start + index), index=index)


def typical_window(plan: Plan, lengths: Sequence[int] | np.ndarray, batches: int) -> int:
    """Where the `batches` batches begin whose tokens, real and padded, are most like the plan's mean: a pure function.

    A short cycle of whatever comes first would give a throughput that hangs on luck.
    """
    specs = [plan.spec(index) for index in range(WINDOWS + batches)]
    sizes = np.array([[sum(int(lengths[row]) for row in s.sample_ids), s.bucket * len(s.sample_ids)] for s in specs], float)
    mean = sizes.mean(axis=0)
    means = np.array([sizes[start : start + batches].mean(axis=0) for start in range(WINDOWS)])
    return int(np.abs(means / mean - 1.0).sum(axis=1).argmin())


class CudaMarks:
    """Step boundaries by events on the drafter's stream: the host runs ahead, the stream does not."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._events: list[Any] = []

    def reserve(self, steps: int) -> None:
        while len(self._events) < steps + 1:
            self._events.append(self._device.event(timing=True))

    def begin(self) -> None:
        self._events[0].record(self._device.stream)

    def mark(self, index: int) -> None:
        self._events[index + 1].record(self._device.stream)

    def end(self, steps: int) -> tuple[float, tuple[float, ...]]:
        """The device has passed all of them: the fence came before."""
        events = self._events
        each = tuple(events[i].elapsed_time(events[i + 1]) * 1e-3 for i in range(steps))
        return events[0].elapsed_time(events[steps]) * 1e-3, each


class GpuDelay:
    """Keeps the drafter's stream busy: a host that waits beside a GPU that works loses nothing."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._cycles_per_ns = 0.0

    def __call__(self, nanoseconds: int) -> int:
        import torch

        if not self._cycles_per_ns:
            self._calibrate()
        torch.cuda._sleep(int(nanoseconds * self._cycles_per_ns))
        return 0

    def _calibrate(self) -> None:
        """Called in the washout of the first arm that carries a delay."""
        import torch

        from dflash.observe.sync_guard import allowed_sync

        cycles = 10_000_000
        first, second = self._device.event(timing=True), self._device.event(timing=True)
        with allowed_sync("calibration of the injected slowdown"):
            torch.cuda._sleep(cycles)
            first.record(self._device.stream)
            torch.cuda._sleep(cycles)
            second.record(self._device.stream)
            second.synchronize()
        self._cycles_per_ns = cycles / (first.elapsed_time(second) * 1e6)


def peak_memory(device: Device) -> int:
    """Most memory taken so far: of the device's allocator, or of this process where there is no GPU."""
    if device.is_cuda:
        import torch

        return int(torch.cuda.max_memory_allocated(device.torch))
    factor = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * factor
