"""The reference layout without its GPUs: five targets, three drafters, all six collectors at work.

    python -m tests.observe.layout

prints what a tick and a flush of it take.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from dflash.config import ObserveConfig
from dflash.observe.collectors.cuda import Snapshots
from dflash.observe.collectors.gpu import GpuCollector
from dflash.observe.observer import Observer
from dflash.observe.recorder import WorkerRecorder
from dflash.observe.roles import Role, RoleMap
from dflash.observe.sinks.base import Row
from dflash.observe.sinks.jsonl import to_line
from tests.observe.parts import FakeDevice, FakePrefetcher, FakeQueue, ListSink

TARGETS, DRAFTERS = 5, 3
STAGES: dict[Role, tuple[str, ...]] = {
    "target": ("target.model_forward", "target.pack_hidden", "target.cpu_copy_enqueue"),
    "drafter": ("drafter.queue_get", "drafter.forward", "drafter.backward", "drafter.optimizer_step"),
    "prefetcher": (),
}
SLOTS = 15


class SimulatedReader:
    """What a GPU's reader leaves for the collector."""

    cpu_s = 0.0

    def __init__(self, index: int) -> None:
        self.index = index

    def take(self) -> dict[str, float]:
        throttles = ("power", "thermal_sw", "thermal_hw", "slowdown_hw", "power_brake_hw")
        values = {"util_pct": 97.0, "mem_used_gb": 61.2, "power_w": 540.0, "temp_c": 64.0}
        return values | {f"throttle_{name}": 0.0 for name in throttles}

    def close(self) -> bool:
        return True


@dataclass
class Figures:
    """What the layout costs.

    Attributes:
        keys: distinct keys of a flush window; `wandb_keys` of them go to W&B; `train_keys` of a step.
        flush_bytes: of a window as a line of metrics.jsonl.
        tick_ms, flush_ms: CPU time of the monitor's thread, medians.
    """

    keys: int
    wandb_keys: int
    train_keys: int
    flush_bytes: int
    tick_ms: float
    flush_ms: float


class Layout:
    """An observer over eight simulated GPUs. `work` does what the workers write in one second; `tick` is the
    monitor's."""

    def __init__(self, folder: Path) -> None:
        names = [f"cuda:{index}" for index in range(TARGETS + DRAFTERS)]
        self.sink = ListSink()
        config = ObserveConfig(
            tick_s=3600, flush_s=36_000, collectors=("profile", "pipeline", "workers", "batch", "cuda")
        )
        self.observer = Observer(
            config, folder, RoleMap(tuple(names[:TARGETS]), tuple(names[TARGETS:])), sinks=[self.sink]
        )
        self.recorders = [self._recorder("target", index, index) for index in range(TARGETS)]
        self.recorders += [self._recorder("drafter", index, TARGETS + index) for index in range(DRAFTERS)]
        self.queue, self.prefetcher = FakeQueue(), FakePrefetcher(longest=4096)
        self.observer.attach(queue=self.queue, prefetcher=self.prefetcher)
        self._random = random.Random(0)
        (gpu,) = [one for one in self.observer._collectors if isinstance(one, GpuCollector)]
        gpu._opener = threading.current_thread()  # as if NVML had been opened
        gpu._readers = tuple(SimulatedReader(index) for index in range(TARGETS + DRAFTERS))  # type: ignore[misc]
        gpu.close = lambda: None  # type: ignore[method-assign]
        self.observer.switch("gpu", True)

    def _recorder(self, role: Role, index: int, gpu: int) -> WorkerRecorder:
        recorder = self.observer.recorder(role, index, FakeDevice(gpu))  # type: ignore[arg-type]
        for stage in STAGES[role]:
            recorder.timer(stage, gpu=stage not in ("target.cpu_copy_enqueue", "drafter.queue_get"))
        recorder.warm()
        return recorder

    def start(self) -> None:
        """As the trainer does; the monitor's own thread then sleeps until the end."""
        self.observer.start()

    def work(self, steps: int = 4) -> None:
        """One second of every worker: `steps` batches each."""
        for recorder in self.recorders:
            for _ in range(steps):
                for timer in recorder.timers.values():
                    timer.add(int(self._random.lognormvariate(18, 0.4)))
                recorder.batches += 1
                recorder.samples += 4
                recorder.tokens += 8000
                recorder.step += 1
                recorder.busy_ns += 200_000_000
                recorder.wait_in_ns += 40_000_000
                recorder.clock._ended_ns = (recorder.clock._ended_ns or 0) + 90_000_000
            (snapshots,) = [one for one in recorder.instruments if isinstance(one, Snapshots)]
            if snapshots.on:
                snapshots.on = False
                snapshots.latest = {
                    name: {"all": {"current": 10**10, "peak": 10**10}}
                    for name in ("allocated_bytes", "reserved_bytes", "inactive_split_bytes")
                } | {"num_alloc_retries": 0, "num_device_alloc": 7}
        lock = self.observer._sources.lock
        lock.held, lock.wakes = lock.held + 1, lock.wakes + 4
        self.queue.buckets = {bucket: self._random.randrange(4) for bucket in (512, 1024, 2048, 4096)}
        self.queue.oldest = time.perf_counter_ns() - 10**9
        self.queue.counters.put_count += steps * TARGETS
        self.queue.counters.get_count += steps * TARGETS
        counters = self.prefetcher.counters
        for _ in range(4 * steps * TARGETS):
            counters.length_bins[self._random.randrange(100)] += 1
        counters.batches += steps * TARGETS
        counters.samples += 4 * steps * TARGETS
        counters.tokens += 8000 * steps * TARGETS
        counters.padded_tokens += 9000 * steps * TARGETS
        counters.loss_tokens += 5000 * steps * TARGETS

    def late(self, step: int) -> None:
        """Training scalars of a step, block size 16."""
        values = {f"train/{name}": 1.2345678 for name in ("loss", "accept_length", "grad_norm", "lr")}
        self.observer.late(
            step, values | {f"train/slot_{k}_accuracy": 0.1234567 for k in range(1, SLOTS + 1)}
        )


def measure(folder: Path, windows: int = 12, ticks: int = 10) -> Figures:
    """Medians over `windows` flush windows of `ticks` ticks."""
    layout = Layout(folder)
    layout.start()
    monitor = layout.observer._monitor
    tick_ms: list[float] = []
    flush_ms: list[float] = []
    for window in range(windows):
        for tick in range(ticks):
            layout.work()
            layout.late(window * ticks + tick)
            last = tick == ticks - 1
            started = time.thread_time()
            monitor.tick(last=last)
            (flush_ms if last else tick_ms).append((time.thread_time() - started) * 1e3)
    layout.observer.close()
    rows = layout.sink.of("metrics")
    flush: Row = rows[windows // 2]
    train = layout.sink.of("train")[0]
    return Figures(
        keys=len(flush.values),
        wandb_keys=sum(
            not any(fnmatch(key, pattern) for pattern in ObserveConfig().wandb_exclude)
            for key in flush.values
        ),
        train_keys=len(train.values),
        flush_bytes=len(to_line(flush).encode()),
        tick_ms=sorted(tick_ms)[len(tick_ms) // 2],
        flush_ms=sorted(flush_ms)[len(flush_ms) // 2],
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    keys = f"{found.keys} keys a window ({found.wandb_keys} of them to W&B), {found.train_keys} a step"
    print(f"{TARGETS} targets, {DRAFTERS} drafters: {keys}")
    print(
        f"{found.flush_bytes:,} bytes a flush; CPU {found.tick_ms:.2f} ms a tick, {found.flush_ms:.2f} ms a "
        "tick with flush"
    )
