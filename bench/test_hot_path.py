"""What one recorded span costs, beside two libraries that people time with; what a collector that is off
costs; and what a tick of the monitor, a sink that is stuck and a pair of CUDA events cost.

    python -m pytest bench/test_hot_path.py --benchmark-columns=min,median,iqr

Ours is a whole span: both clock reads, the bucket, sum and maximum. Theirs is the recording call alone,
without the clock reads that it needs around it, so the comparison favours them. The judged ratios come from
loops that take turns in one process: a ratio of neighbours, never two lone times."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

import pytest
import torch

from dflash.observe.recorder import StageTimer
from dflash.observe.timeline.log import Timeline

CALLS, ROUNDS = 2000, 41
SPAN_LIMIT_NS = 1000.0
OFF_LIMIT_NS = 50.0
PAIR_LIMIT_NS = 50_000.0
TICK_LIMIT_MS = 5.0
STUCK_LIMIT = 1.5


def span_on() -> Callable[[], None]:
    """What a worker writes around a stage, the collector on."""
    timer = StageTimer("probe")
    timer.switch(True)

    def span() -> None:
        if timer.on:
            timer.start()
        if timer.on:
            timer.stop()

    return span


def span_off() -> Callable[[], None]:
    """The same two lines, the collector off."""
    timer = StageTimer("probe")

    def span() -> None:
        if timer.on:
            timer.start()
        if timer.on:
            timer.stop()

    return span


def prometheus() -> Callable[[], None]:
    library = pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    histogram = library.Histogram("probe_seconds", "a span", registry=library.CollectorRegistry())
    return lambda: histogram.observe(0.0123)


def opentelemetry() -> Callable[[], None]:
    metrics = pytest.importorskip(
        "opentelemetry.sdk.metrics", reason="the OpenTelemetry SDK is not installed"
    )
    reader = pytest.importorskip("opentelemetry.sdk.metrics.export").InMemoryMetricReader()
    histogram = metrics.MeterProvider(metric_readers=[reader]).get_meter("probe").create_histogram("span")
    return lambda: histogram.record(12.3)


def nothing() -> Callable[[], None]:
    return lambda: None


RIVALS = {"prometheus_client Histogram.observe": prometheus, "OpenTelemetry Histogram.record": opentelemetry}


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """Garbage collection would land in one loop and not in its neighbour."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.benchmark(group="one recorded span")
@pytest.mark.parametrize("make", [span_on, *RIVALS.values()], ids=["dflash StageTimer start+stop", *RIVALS])
def test_span(benchmark: Any, make: Callable[[], Callable[[], None]]) -> None:
    benchmark.pedantic(make(), rounds=30, iterations=CALLS, warmup_rounds=3)


@pytest.mark.benchmark(group="collector off, two instrument calls")
@pytest.mark.parametrize("make", [span_off, nothing], ids=["dflash StageTimer off", "an empty function"])
def test_off(benchmark: Any, make: Callable[[], Callable[[], None]]) -> None:
    benchmark.pedantic(make(), rounds=30, iterations=CALLS, warmup_rounds=3)


def test_a_span_is_under_a_microsecond_and_faster_than_the_libraries() -> None:
    names = {"ours": span_on(), **{name: make() for name, make in RIVALS.items()}, "loop": nothing()}
    times = in_turns(names)
    ours = best(times["ours"]) - best(times["loop"])
    print(f"one span: {ours:.0f} ns")
    assert ours < SPAN_LIMIT_NS
    for name in RIVALS:
        ratio = median(theirs / mine for theirs, mine in zip(times[name], times["ours"], strict=True))
        print(f"{name}: {best(times[name]) - best(times['loop']):.0f} ns, {ratio:.2f} times ours")
        assert ratio > 1.0


def test_a_span_of_the_timeline_is_under_a_microsecond_more() -> None:
    """With `dflash train --timeline`; without it a span reads one attribute, which `span_on` does too."""
    log = Timeline(20, 8).log("probe")
    times = in_turns({"logged": lambda: log.add("probe", 1, 2), "loop": nothing()})
    more = best(times["logged"]) - best(times["loop"])
    print(f"one span in the timeline's log: {more:.0f} ns")
    assert more < SPAN_LIMIT_NS


def test_off_is_free() -> None:
    times = in_turns({"off": span_off(), "loop": nothing()})
    per_call = (best(times["off"]) - best(times["loop"])) / 2
    print(f"off: {per_call:.1f} ns an instrument call")
    assert per_call < OFF_LIMIT_NS


def test_a_tick_of_eight_gpus_is_a_few_milliseconds(tmp_path: Path) -> None:
    """A millisecond of a tick a second is a per mille of one core; five leave room for a busy machine."""
    from tests.observe.layout import measure

    found = measure(tmp_path, windows=6)
    print(f"CPU {found.tick_ms:.2f} ms a tick, {found.flush_ms:.2f} ms a tick with flush")
    assert found.tick_ms < TICK_LIMIT_MS


def test_a_sink_that_is_stuck_costs_the_worker_nothing(tmp_path: Path) -> None:
    """What a worker hands over at each step, beside a sink that takes all and one that does not come back."""
    from dflash.config import ObserveConfig
    from dflash.observe.observer import Observer
    from dflash.observe.roles import RoleMap
    from dflash.observe.sinks.base import Sink

    go = threading.Event()

    class Taking(Sink):
        name = "taking"

        def __init__(self) -> None:
            """Needs none of its surroundings."""

        def write(self, rows: list[Any]) -> None:
            pass

    class Stuck(Taking):
        name = "stuck"

        def write(self, rows: list[Any]) -> None:
            go.wait()

    def handing(sink: Sink, folder: Path) -> tuple[Observer, Callable[[], None]]:
        observer = Observer(ObserveConfig(tick_s=0.05), folder, RoleMap(("cpu",), ("cpu",)), sinks=[sink])
        values = {"train/loss": 1.0}
        observer.start()
        return observer, lambda: observer.late(1, values)

    taking, with_taking = handing(Taking(), tmp_path / "a")
    stuck, with_stuck = handing(Stuck(), tmp_path / "b")
    times = in_turns({"taking": with_taking, "stuck": with_stuck})
    go.set()
    taking.close()
    stuck.close()
    ratio = median(slow / plain for slow, plain in zip(times["stuck"], times["taking"], strict=True))
    print(f"a step's scalars: {best(times['taking']):.0f} ns, {ratio:.2f} times that with a stuck sink")
    assert ratio < STUCK_LIMIT


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_an_event_pair_is_cheap() -> None:
    from bench.gpu_check.stages.events import event_cost

    found = event_cost()
    print(found)
    assert found["record pair"] < PAIR_LIMIT_NS


def in_turns(calls: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """Nanoseconds a call, loops of all taking turns, so that each round's figures share the machine's
    mood."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            started = perf_counter_ns()
            for _ in range(CALLS):
                call()
            times[name].append((perf_counter_ns() - started) / CALLS)
    return times


def best(times: list[float]) -> float:
    """The lower quartile: what the code takes when nobody else has the core."""
    return sorted(times)[len(times) // 4]
