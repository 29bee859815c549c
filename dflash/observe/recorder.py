"""What a worker writes while it trains: spans of its stages and counters. One writer each, no lock, no host
sync.

A worker times a stage with

    if timer.on:
        timer.start()
    ...
    if timer.on:
        timer.stop()

so a collector that is off costs one attribute read. The switch may be thrown between the two: `stop` without
a `start` is ignored, and a `start` whose `stop` never came is forgotten when the timer is switched on again.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

from dflash.device import Device
from dflash.observe.histogram import MASK, SpanRing
from dflash.observe.roles import Role
from dflash.observe.syncs import allowed_sync
from dflash.observe.timeline.log import SpanLog, Timeline
from steptime.host_time import ThreadClock

_FAR_NS = 10_000_000_000


class StageTimer(SpanRing):
    """Times host work with `perf_counter_ns`, and on the CPU every stage. Owned by one worker thread.

    Attributes:
        on: the switch; read by the worker before each call.
        dropped: spans that found no free event pair (GPU stages only).
        log: where its spans go for the timeline; None: there is none.
    """

    __slots__ = ("_started_ns", "dropped", "log", "name", "on")

    def __init__(self, name: str, log: SpanLog | None = None) -> None:
        super().__init__()
        self.name = name
        self.on = False
        self.dropped = 0
        self.log = log
        self._started_ns = 0

    def start(self) -> None:
        self._started_ns = perf_counter_ns()

    def stop(self) -> None:
        started_ns = self._started_ns
        if started_ns:
            now_ns = perf_counter_ns()
            count = self.count
            self.ring[count & MASK] = now_ns - started_ns
            self.count = count + 1
            self._started_ns = 0
            log = self.log
            if log is not None:
                log.add(self.name, started_ns, now_ns)

    def add(self, value_ns: int) -> None:
        """Record a duration measured elsewhere, nanoseconds, at least 0."""
        count = self.count
        self.ring[count & MASK] = value_ns
        self.count = count + 1

    def switch(self, on: bool) -> None:
        """Throw the switch, from any thread. A span left open when it was thrown off is forgotten."""
        if on and not self.on:
            self._forget()
        self.on = on

    def _forget(self) -> None:
        self._started_ns = 0


class CudaStageTimer(StageTimer):
    """Times a stage on the worker's stream with a pair of pooled CUDA events, read later by
    `EventPool.drain`.

    The time is the stream's: it includes waits inside the stream (`wait_event`, work queued before).

    Attributes:
        total_ns: of all spans read so far.
    """

    __slots__ = ("_open", "_pair", "_pool", "total_ns")

    def __init__(self, name: str, pool: EventPool) -> None:
        super().__init__(name, pool.log)
        self._pool = pool
        pool.stages.append(self)
        self._pair: tuple[Any, Any] | None = None
        self._open = False
        self.total_ns = 0

    def add(self, value_ns: int) -> None:
        self.total_ns += value_ns
        super().add(value_ns)

    def start(self) -> None:
        pair = self._pair
        if pair is None:
            pool = self._pool
            if not pool.free:
                self.dropped += 1
                return
            pair = self._pair = pool.free.pop()
        pair[0].record(self._pool.stream)
        self._open = True

    def stop(self) -> None:
        pair = self._pair
        if self._open and pair is not None:
            self._open = False
            self._pair = None
            pair[1].record(self._pool.stream)
            self._pool.put(self, pair)

    def _forget(self) -> None:
        self._open = False


class Instrument:
    """What a collector runs in a worker's thread, at its step boundary.

    Attributes:
        on: its switch, all that a step reads while it is off.
        collector: the name of the collector that hung it into the recorder.
    """

    on = False
    collector = ""

    def run(self) -> None:
        """Called at each step boundary while it is on. It must not wait."""
        raise NotImplementedError

    def fail(self) -> None:
        """`run` has raised: stay off until the collector is switched on again."""
        self.on = False


class EventPool(Instrument):
    """The event pairs of one worker on one device: made once, lent to stages, read in the order they were
    recorded.

    A pair is in one of three places: `free`, held by an open stage, or pending. Only pending pairs are
    queried, and both their events have been recorded, so that `query` means what it says (on an event never
    recorded it is true).

    Attributes:
        on: pairs are pending, or no event has been made yet; the stages' own switches say whether more will
            come.
        stages: the timers that take pairs from here.
        span_ns: host time of one span, measured by `warm`: two records, two queries in place of reading it.
        log: the stream's log of the timeline; None: there is none.
    """

    on = True

    def __init__(self, device: Device) -> None:
        self._device = device
        self.stages: list[CudaStageTimer] = []
        self.span_ns = 0.0
        self.log: SpanLog | None = None
        self._anchor: tuple[tuple[Any, Any], int] | None = None
        self.free: list[tuple[Any, Any]] = []
        self.stream: Any = None
        self._timers: list[CudaStageTimer | None] = []
        self._pairs: list[tuple[Any, Any] | None] = []
        self._head = 0
        self._tail = 0

    def grow(self, pairs: int) -> None:
        """More pairs, before the worker starts."""
        event = self._device.event
        self.free.extend((event(timing=True), event(timing=True)) for _ in range(pairs))
        self._timers.extend([None] * pairs)
        self._pairs.extend([None] * pairs)

    def warm(self) -> None:
        """Record every event on the worker's stream at the first call: it is created then, which is slow."""
        if self.stream is not None:
            return
        self.stream = self._device.stream
        for pair in self.free:
            for event in pair:
                event.record(self.stream)
        started_ns = perf_counter_ns()
        for pair in self.free:
            for event in pair:
                event.record(self.stream)
                event.query()
        self.span_ns = (perf_counter_ns() - started_ns) / max(1, len(self.free))
        if self.log is not None and self.free:
            self._set_anchor()

    def _set_anchor(self) -> None:
        """Tie the stream's time to the host's clock: an event that has fired by the time that the clock is
        read. Waits for the device, before the timeline's first step."""
        pair = self.free.pop()
        with allowed_sync("the timeline's first moment, before its first step"):
            pair[1].record(self.stream)
            self._device.synchronize()  # sync: ok, once, before the timeline's first step
        self._anchor = pair, perf_counter_ns()

    def record(self, log: SpanLog | None) -> None:
        """Log spans from now on; None: no more, and what the device has passed is read. Waits for the
        device where it begins; from any thread while the worker stands still."""
        self.drain()
        if self._anchor is not None:
            self.free.append(self._anchor[0])
            self._anchor = None
        self.log = log
        for timer in self.stages:
            timer.log = log
        if log is not None and self.stream is not None and self.free:
            self._set_anchor()

    def put(self, timer: CudaStageTimer, pair: tuple[Any, Any]) -> None:
        """A stage has ended; its pair waits to be read. There is room for every pair."""
        at = self._head % len(self._pairs)
        self._timers[at] = timer
        self._pairs[at] = pair
        self._head += 1
        self.on = True

    def run(self) -> None:
        """Read what the GPU has passed, at the worker's step boundary."""
        if self.stream is None:
            self.warm()
        self.drain()

    def fail(self) -> None:
        """Stages off, what is pending dropped: after a CUDA error nothing more can be recorded or read."""
        for timer in self.stages:
            timer.on = False
        self._tail = self._head
        self.on = False

    def drain(self) -> None:
        """Read the pairs that the GPU has passed, oldest first, and stop at the first that it has not: never
        waits."""
        size = len(self._pairs)
        while self._tail < self._head:
            at = self._tail % size
            pair, timer = self._pairs[at], self._timers[at]
            assert pair is not None
            assert timer is not None
            if not pair[1].query():
                return
            span_ns = int(pair[0].elapsed_time(pair[1]) * 1e6)
            timer.add(span_ns)
            self._tail += 1
            self.free.append(pair if self.log is None else self._kept(timer, pair, span_ns))
        self.on = False

    def _kept(self, timer: CudaStageTimer, pair: tuple[Any, Any], span_ns: int) -> tuple[Any, Any]:
        """Log a span that has been read; the pair that is free now.

        CUDA tells times between events in a float32 of milliseconds, so a far anchor would be a coarse one:
        the span's own end takes its place in time."""
        if self._anchor is None or timer.log is None:
            return pair
        anchor, anchor_ns = self._anchor
        begin_ns = anchor_ns + int(anchor[1].elapsed_time(pair[0]) * 1e6)
        timer.log.add(timer.name, begin_ns, begin_ns + span_ns)
        if begin_ns - anchor_ns < _FAR_NS:
            return pair
        self._anchor = pair, begin_ns + span_ns
        return anchor


class WorkerRecorder:
    """Everything that one worker writes. The monitor reads it, and writes only the switches.

    Attributes:
        instruments: what runs at the step boundary; on CUDA the event pool, and what collectors have hung in.
        pool: the event pairs of the stages on the GPU; None on the CPU.
        timers: the stages, by name.
        count: while it is on the worker keeps the counters below.
        batches, tokens, samples: finished, cumulative. tokens are real (non-padding) context tokens.
        flops: what those batches asked of this worker (`models.flops`), cumulative.
        step: index of the batch (target) or optimizer step (drafter) in hand.
        busy_ns, wait_in_ns, wait_out_ns: cumulative host time at work, waiting for input, waiting to hand
            over.
        wait_in_since_ns, wait_out_since_ns: `perf_counter_ns` at which the wait in progress began, 0 for
            none: a worker that is stuck is seen while it is stuck. Set it before a wait; clear it before
            adding to the total.
        clock: CPU time of the thread; it runs around all that the thread does.
        fault: (collector, error) of an instrument that failed, for the monitor, which takes it away.
        log: the thread's log of the timeline; None: there is none. With one, stages and counters are on.
    """

    def __init__(
        self, role: Role, index: int, device: Device, ring: int = 64, timeline: Timeline | None = None
    ) -> None:
        self.role = role
        self.index = index
        self.device = device
        self.timers: dict[str, StageTimer] = {}
        self.log = None if timeline is None else timeline.log(self.label)
        self._counting = False
        self.count = self.log is not None
        self.batches = self.tokens = self.samples = self.flops = self.step = 0
        self.busy_ns = self.wait_in_ns = self.wait_out_ns = 0
        self.wait_in_since_ns = self.wait_out_since_ns = 0
        self.fault: tuple[str, Exception] | None = None
        self.clock = ThreadClock()
        self._timing = False
        self._ring = ring
        self.pool = EventPool(device) if device.is_cuda or device.asynchronous else None
        if self.pool is not None and timeline is not None:
            self.pool.log = timeline.log(f"{self.label} stream")
        self.instruments: tuple[Instrument, ...] = () if self.pool is None else (self.pool,)

    @property
    def label(self) -> str:
        return f"{self.role}/{self.index}"

    def timer(self, name: str, gpu: bool = False) -> StageTimer:
        """The timer of a stage, made at the first call, which must come before the worker's loop.

        gpu: the stage is work enqueued on the device; timed by events there, by the host's clock on the CPU.
        """
        if name not in self.timers:
            if gpu and self.pool is not None:
                self.pool.grow(self._ring)
                self.timers[name] = CudaStageTimer(name, self.pool)
            else:
                self.timers[name] = StageTimer(name, self.log)
            self.timers[name].switch(self._timing or self.log is not None)
        return self.timers[name]

    def switch_timers(self, on: bool) -> None:
        """Switch all stages, those still to come too; from any thread."""
        self._timing = on
        for timer in tuple(self.timers.values()):
            timer.switch(on or self.log is not None)

    def switch_counters(self, on: bool) -> None:
        """Switch the counters, from any thread."""
        self._counting = on
        self.count = on or self.log is not None

    def record(self, timeline: Timeline | None) -> None:
        """Log spans from now on; None: no more. From any thread while the worker stands still. On a GPU it
        waits for the device where it begins."""
        self.log = None if timeline is None else timeline.log(self.label)
        for timer in self.timers.values():
            if not isinstance(timer, CudaStageTimer):
                timer.log = self.log
        if self.pool is not None:
            self.pool.record(None if timeline is None else timeline.log(f"{self.label} stream"))
        self.switch_timers(self._timing)
        self.switch_counters(self._counting)

    def gpu_busy_ns(self) -> int | None:
        """Cumulative time of the stages on the GPU's stream, as far as it has been read; None without such a
        stage."""
        stages = [timer for timer in tuple(self.timers.values()) if isinstance(timer, CudaStageTimer)]
        return sum(timer.total_ns for timer in stages) if stages else None

    def warm(self) -> None:
        """Create the CUDA events. Call in the worker's thread with its device active, before the first
        step."""
        if self.pool is not None:
            self.pool.warm()

    def hang(self, collector: str, instrument: Instrument) -> None:
        """Have an instrument of a collector run at each step boundary from now on; before the first step."""
        instrument.collector = collector
        if instrument not in self.instruments:
            self.instruments = (*self.instruments, instrument)

    def step_boundary(self) -> None:
        """Called by the owner once per step. The worker goes on when an instrument fails."""
        for instrument in self.instruments:
            if instrument.on:
                try:
                    instrument.run()
                except Exception as error:
                    instrument.fail()
                    self.fault = (instrument.collector, error)
