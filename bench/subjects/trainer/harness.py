"""How the harness runs the trainer: its settings, where its workers stand at a segment's end, which window of
the plan it replays, and how steps are timed on CUDA.

Between two segments all stand still, drained: the drafters at a step boundary, the queue full, every target
worker with the next batch in hand, the prefetcher with all that it may build, no device with work left. So
every segment holds the same work of every stage, N batches through each, which takes N times the slowest
stage's time, as in an endless run. Without it a segment of N steps of the drafter holds N-2 to N+2 batches of
the target, and inherits or leaves the rest; that alone was two thirds of the noise on two shared cores."""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dflash.config import Config
from dflash.data.batch import BatchSpec
from dflash.data.plan import Plan
from dflash.device import Device

CYCLE_STEPS = 4
"""Steps that make one cycle of batches. A segment holds whole cycles, so on a slow machine a long cycle makes
long segments."""
WINDOWS = 64
"""Places in the plan that are looked at for a cycle that is like the whole."""
ENDLESS = 10_000_000
"""Steps of the run, which the plan ends."""
WAITING_PER_WORKER = {"cpu": 1, "cuda": 2}
"""Batches that may wait in the queue for each worker of the larger role. A deep queue lets a slow stage hide
for as long as it takes to run dry; a shallow one shows it at once. On CUDA the host runs ahead of its device,
and needs one more to do so."""
LOOK_S = 1e-4
"""Between two looks at whether all stand still: short beside a segment, long beside the look."""
BARRIER_S = 60.0
"""More than this for a few batches, and something is broken."""


def harness_config(config: Config) -> Config:
    """The user's config as the harness runs it.

    Ordered mode and a learning rate of 0, so that losses repeat bit for bit; no schedule, no checkpoints; a
    shallow queue, so that what slows any stage slows the whole within a few steps; JSONL as the only sink;
    all collectors off until a switch is thrown."""
    from dflash.observe.registry import without_sinks

    devices = (*config.target.devices, *config.drafter.devices)
    kind = "cuda" if any(name.startswith("cuda") for name in devices) else "cpu"
    workers = max(len(config.drafter.devices), len(config.target.devices))
    capacity = min(config.queue.capacity, max(workers, WAITING_PER_WORKER[kind] * workers))
    queue = {"ordered": True, "capacity": capacity, "hs_min_ready": min(config.queue.hs_min_ready, 1)}
    train = {"lr": 0.0, "weight_decay": 0.0, "warmup": 0.0, "steps": ENDLESS, "checkpoint_every": 0}
    # A worker that waits for the harness's next request has not hung.
    train |= {"hang_s": 0.0, "heldout_every": 0}
    data = {"prefetch": min(config.data.prefetch, 2), "heldout": ""}
    return config.model_copy(
        update={
            "queue": config.queue.model_copy(update=queue),
            "train": config.train.model_copy(update=train),
            "observe": without_sinks(config.observe).model_copy(update={"collectors": ()}),
            "data": config.data.model_copy(update=data),
        }
    )


def single_threaded_roles(config: Config) -> list[str]:
    """The workers' roles where all work on the CPU, each with one thread: only then may each keep a core;
    else empty."""
    from dflash.pipeline.build import threads_per_worker

    names = (*config.target.devices, *config.drafter.devices)
    if threads_per_worker(config) != 1 or not all(name.startswith("cpu") for name in names):
        return []
    drafters = [f"drafter/{index}" for index in range(len(config.drafter.devices))]
    return drafters + [f"target/{index}" for index in range(len(config.target.devices))]


class DrainedBarrier:
    """Where the drafters stand together: at the boundary of `step`, until drafter 0 names the next one."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._standing = 0
        self._moved = threading.Condition()

    def stay(self, stopping: threading.Event) -> None:
        """Another drafter's end: wait until drafter 0 moves on, or the run stops."""
        with self._moved:
            here = self.step
            self._standing += 1
            while self.step == here and not stopping.is_set():
                self._moved.wait(0.1)
            self._standing -= 1

    def move_on(self, step: int) -> None:
        """Drafter 0's end: all go on, and stand next at the boundary of `step`."""
        with self._moved:
            self.step = step
            self._moved.notify_all()

    def wait(self, rest_stands: Callable[[], bool], others: int, stopping: threading.Event) -> None:
        """Until `others` drafters and the rest of the pipeline stand still, or the run stops.

        Raises:
            RuntimeError: they do not.
        """
        deadline = time.monotonic() + BARRIER_S
        while not (self._standing == others and rest_stands()) and not stopping.is_set():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the pipeline does not drain within {BARRIER_S:g} s at a segment's end")
            time.sleep(LOOK_S)


@dataclass(frozen=True, slots=True)
class From:
    """A plan from place `start` on."""

    inner: Plan
    start: int

    def spec(self, index: int) -> BatchSpec:
        return replace(self.inner.spec(self.start + index), index=index)


def typical_window(plan: Plan, lengths: Sequence[int] | np.ndarray, batches: int) -> int:
    """Where the `batches` batches begin whose tokens, real and padded, are most like the plan's mean: a pure
    function.

    A short cycle of whatever comes first would give a throughput that hangs on luck.
    """
    specs = [plan.spec(index) for index in range(WINDOWS + batches)]
    sizes = np.array(
        [[sum(int(lengths[row]) for row in s.sample_ids), s.bucket * len(s.sample_ids)] for s in specs], float
    )
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
        """All work came to its end before the last mark, so this waits for the mark alone."""
        from dflash.observe.syncs import allowed_sync

        events = self._events
        with allowed_sync("end of a measured segment"):
            events[steps].synchronize()
        each = tuple(events[i].elapsed_time(events[i + 1]) * 1e-3 for i in range(steps))
        return events[0].elapsed_time(events[steps]) * 1e-3, each


class GpuDelay:
    """Keeps the drafter's stream busy: a host that waits beside a GPU that works loses nothing."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._cycles_per_ns = 0.0

    def __call__(self, nanoseconds: int) -> None:
        import torch

        torch.cuda._sleep(int(nanoseconds * self._cycles_per_ns))

    def calibrate(self) -> None:
        """In the drafter's thread between two segments, or the first one with a delay would pay for it.
        Once."""
        if self._cycles_per_ns:
            return
        import torch

        from dflash.observe.syncs import allowed_sync

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
