"""Stage: what CUDA events cost on the hot path."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

from bench.gpu_check.stage import Found, Table, rows_of

CALLS, REPEATS = 500, 7


class EventsStage:
    """Host time of a pair, of a poll, and of a stage timer as the recorder uses it."""

    name = "events"
    asks = "What does a pair of CUDA events cost the host, and a span of the recorder?"
    seconds = 10

    def look(self) -> Found:
        return read(event_cost())


def read(cost_ns: Mapping[str, float]) -> Found:
    """The figures. Pure."""
    problems = [f"{name}: took no time" for name, cost in cost_ns.items() if cost <= 0]
    rows = rows_of(*((name, f"{cost:.0f}") for name, cost in cost_ns.items()))
    table = Table("Host time", ("call", "ns"), rows)
    return Found(len(cost_ns), "calls", tuple(problems), (), (table,))


def event_cost() -> dict[str, float]:
    """Host nanoseconds of each call, the median of some loops."""
    import torch

    from dflash.device import Device
    from dflash.observe.recorder import WorkerRecorder

    device = Device("cuda:0")
    with device.active():
        pair = (device.event(timing=True), device.event(timing=True))
        pair[0].record(device.stream)
        pair[1].record(device.stream)
        torch.cuda.synchronize()
        recorder = WorkerRecorder("drafter", 0, device, 64)
        timer = recorder.timer("drafter.forward", gpu=True)
        timer.switch(True)

        def record() -> None:
            pair[0].record(device.stream)
            pair[1].record(device.stream)

        def span() -> None:
            timer.start()
            timer.stop()
            recorder.step_boundary()

        return {"record pair": _ns(record), "query": _ns(pair[1].query), "span with drain": _ns(span)}


def _ns(call: Callable[[], object]) -> float:
    import torch

    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        started = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter_ns() - started) / CALLS)
    return round(median(times), 1)
