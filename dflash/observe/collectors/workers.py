"""workers: what every target and every drafter does with its time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import ClassVar

from dflash.device import Device
from dflash.observe.accounting import cost_ns
from dflash.observe.collectors.base import Collector, Sources
from dflash.observe.collectors.host import METRICS as HOST_METRICS
from dflash.observe.collectors.host import STANDING, WORKER_HOST, HostTime
from dflash.observe.metric import Metric
from dflash.observe.recorder import WorkerRecorder
from dflash.observe.roles import Role

ROLES: tuple[Role, ...] = ("target", "drafter")
_COUNTERS = "the worker's own counters"
_FLOPS = (
    "the FLOP model of `dflash/models/flops.py`, and the machine's matmul rate, measured before the workers "
    "start; absent where nobody did"
)


def _metrics() -> tuple[Metric, ...]:
    found: list[Metric] = []
    for role, unit in (("target", "batches"), ("drafter", "steps")):
        key = f"{role}/{{i}}"
        place = "place in the plan of the batch in hand" if role == "target" else "optimizer step reached"
        found += [
            Metric(f"{key}/batches", "batches", "delta", "batches finished", _COUNTERS),
            Metric(
                f"{key}/tokens", "tokens", "delta", "real (non-padding) tokens of those batches", _COUNTERS
            ),
            Metric(f"{key}/samples", "samples", "delta", "samples of those batches", _COUNTERS),
            Metric(f"{key}/step", unit, "instant", place, _COUNTERS, reduce="last"),
            Metric(
                f"{key}/busy_s",
                "s",
                "delta",
                "time at work: on CUDA the stages' time on the stream, absent while `profile` is off; on the "
                "CPU host time",
                f"{_COUNTERS}; on CUDA the event pairs of `profile`",
            ),
            Metric(
                f"{key}/wait_in_s",
                "s",
                "delta",
                "host time waiting for input, the wait in progress included",
                _COUNTERS,
            ),
            Metric(
                f"{key}/wait_out_s",
                "s",
                "delta",
                "host time waiting to hand on its work, likewise",
                _COUNTERS,
            ),
            Metric(
                f"{key}/tokens_per_second",
                "tokens/s",
                "rate",
                "tokens finished per second of wall time",
                _COUNTERS,
            ),
            Metric(
                f"{key}/capacity_tokens_per_second",
                "tokens/s",
                "ratio",
                "tokens per second at work: the rate if it never waited; absent when nothing was finished",
                _COUNTERS,
                weight=f"{key}/busy_s",
            ),
        ]
    found.append(
        Metric(
            "train/mfu",
            "1",
            "ratio",
            "share of the matmul rate of all hardware in use that the targets' forward and the drafters' "
            "training ask for: no padding, of attention only what is seen, nothing computed twice",
            _FLOPS,
        )
    )
    for role in ROLES:
        found.append(
            Metric(
                f"{role}/mfu",
                "1",
                "ratio",
                f"likewise, what is asked of the {role}s over the matmul rate of the hardware that they have",
                _FLOPS,
            )
        )
        found.append(
            Metric(
                f"{role}/skew",
                "1",
                "ratio",
                f"tokens of the busiest {role} over the mean of all {role}s; 1 is even; absent with one "
                f"{role}",
                _COUNTERS,
            )
        )
    found += [replace(WORKER_HOST, key=WORKER_HOST.key.replace("{role}", role)) for role in ROLES]
    return (*found, *HOST_METRICS)


@dataclass(frozen=True)
class _Counts:
    batches: int
    tokens: int
    samples: int
    flops: int
    busy_ns: int | None
    wait_in_ns: int
    wait_out_ns: int


class WorkersCollector(Collector):
    """What every target and every drafter does with its time, how even the work is, and what it takes of the
    host and of the interpreter lock.

    Takes deltas of each worker's single-writer counters.
    """

    name = "workers"
    every_tick = False
    metrics: ClassVar[tuple[Metric, ...]] = _metrics()

    def __init__(self, sources: Sources) -> None:
        super().__init__(sources)
        self._before: dict[str, tuple[int, _Counts]] = {}
        self._flops_before: dict[Role, tuple[int, int]] = {}
        self._standing_before = -1
        self._host = HostTime(sources)

    def throw(self, on: bool) -> None:
        for recorder in self.sources.recorders:
            recorder.switch_counters(on)
        self._host.throw(on)

    def reset(self) -> None:
        self._before.clear()
        self._host.reset()
        self._flops_before.clear()
        self._standing_before = -1

    def sample(self, now_ns: int) -> dict[str, float]:
        values: dict[str, float] = {}
        for role in ROLES:
            tokens = []
            for recorder in self.sources.workers(role):
                one = self._worker(recorder, now_ns)
                values.update(one)
                if (key := f"{recorder.label}/tokens") in one:
                    tokens.append(one[key])
            if len(tokens) > 1 and sum(tokens) > 0:
                values[f"{role}/skew"] = max(tokens) * len(tokens) / sum(tokens)
        standing_ns = self.sources.standing.ns(now_ns)
        values.update(self._mfu(now_ns - standing_ns))
        stood_ns = standing_ns - self._standing_before
        if self._standing_before >= 0 and stood_ns > 0:
            values[STANDING] = stood_ns / 1e9
        self._standing_before = max(standing_ns, self._standing_before)
        values.update(self._host.sample())
        self.cpu_ns += self._host.take_cpu_ns()
        return values

    def _mfu(self, now_ns: int) -> dict[str, float]:
        """Shares of the matmul rate since the last sample. `now_ns`: of training, without what it stood
        still."""
        values: dict[str, float] = {}
        roles, asked = self.sources.roles, 0.0
        for role in ROLES:
            flops = sum(self._before[one.label][1].flops for one in self.sources.workers(role))
            before_ns, before = self._flops_before.setdefault(role, (now_ns, flops))
            if now_ns <= before_ns:
                continue  # all of it was a look; the next sample has this one's work
            self._flops_before[role] = now_ns, flops
            per_second = (flops - before) * 1e9 / (now_ns - before_ns)
            asked += per_second
            if rate := roles.rate(role):
                values[f"{role}/mfu"] = per_second / rate
        if values and (rate := roles.rate()):
            values["train/mfu"] = asked / rate
        return values

    def instruments(self) -> tuple[int, float]:
        calls = sum(recorder.batches for recorder in self.sources.recorders)
        return calls, cost_ns(lambda: _probe(WORKER_PROBE)) if calls else 0.0

    def _worker(self, recorder: WorkerRecorder, now_ns: int) -> dict[str, float]:
        label = recorder.label
        before_ns, before = self._before.get(label, (0, None))
        now = _read(recorder, now_ns)
        self._before[label] = now_ns, now
        values = {f"{label}/step": float(recorder.step)}
        if before is None or now_ns <= before_ns:
            return values
        tokens = now.tokens - before.tokens
        values[f"{label}/batches"] = float(now.batches - before.batches)
        values[f"{label}/tokens"] = float(tokens)
        values[f"{label}/samples"] = float(now.samples - before.samples)
        # A wait in progress may have been counted a little too long; the totals put it right at the next
        # sample.
        values[f"{label}/wait_in_s"] = max(0, now.wait_in_ns - before.wait_in_ns) / 1e9
        values[f"{label}/wait_out_s"] = max(0, now.wait_out_ns - before.wait_out_ns) / 1e9
        values[f"{label}/tokens_per_second"] = tokens * 1e9 / (now_ns - before_ns)
        if now.busy_ns is not None and before.busy_ns is not None:
            busy_s = (now.busy_ns - before.busy_ns) / 1e9
            values[f"{label}/busy_s"] = busy_s
            if busy_s > 0.0 and tokens > 0:
                values[f"{label}/capacity_tokens_per_second"] = tokens / busy_s
        return values


def _read(recorder: WorkerRecorder, now_ns: int) -> _Counts:
    """The counters, waits in progress added. Their starts are read first: see `pipeline._read`."""
    in_since, out_since = recorder.wait_in_since_ns, recorder.wait_out_since_ns
    wait_in_ns = recorder.wait_in_ns + (max(0, now_ns - in_since) if in_since else 0)
    wait_out_ns = recorder.wait_out_ns + (max(0, now_ns - out_since) if out_since else 0)
    busy_ns: int | None = recorder.busy_ns
    if recorder.device.is_cuda:
        # The host only enqueues there: its time at work says nothing about the GPU's.
        busy_ns = (
            recorder.gpu_busy_ns() if any(timer.on for timer in tuple(recorder.timers.values())) else None
        )
    return _Counts(
        recorder.batches,
        recorder.tokens,
        recorder.samples,
        recorder.flops,
        busy_ns,
        wait_in_ns,
        wait_out_ns,
    )


WORKER_PROBE = WorkerRecorder("prefetcher", 0, Device("cpu"))


def _probe(recorder: WorkerRecorder) -> None:
    """What a worker does for this collector with each batch."""
    wanted_ns = perf_counter_ns() if recorder is not None else 0
    recorder.wait_in_since_ns = wanted_ns
    started_ns = perf_counter_ns()
    recorder.wait_in_since_ns = 0
    recorder.wait_in_ns += started_ns - wanted_ns
    recorder.wait_out_since_ns = started_ns
    pooled_ns = perf_counter_ns()
    recorder.wait_out_since_ns = 0
    recorder.wait_out_ns += pooled_ns - started_ns
    done_ns = perf_counter_ns()
    recorder.busy_ns += done_ns - pooled_ns
    recorder.wait_out_since_ns = done_ns
    recorder.wait_out_since_ns = 0
    recorder.batches += 1
    recorder.samples += 1
    recorder.tokens += 1
    recorder.flops += 1
    recorder.step = 1
    recorder.wait_out_ns += perf_counter_ns() - done_ns
