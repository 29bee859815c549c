"""The thread that builds batches ahead of the target workers, and what it counts while they are still in host
memory."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dflash.data.batch import Batch, BatchSpec
from dflash.data.plan import Plan
from dflash.observe.timeline.log import PREFETCHED

if TYPE_CHECKING:
    from dflash.observe.recorder import WorkerRecorder

BINS = 512


class BatchCounters:
    """Sums over the batches built so far. Written by the prefetcher's thread alone; anyone may read.

    Attributes:
        count: the switch of the `batch` collector, off at first; while off, nothing below moves.
        batches, samples: finished, cumulative.
        tokens, padded_tokens, loss_tokens: real tokens, tokens with padding, supervised tokens.
        supervised_slots: slots that the loss covers.
        bin_tokens: width of a length bin.
        length_bins: samples by length; bin i holds lengths of `(i * bin_tokens, (i+1) * bin_tokens]`.
    """

    __slots__ = (
        "batches",
        "bin_tokens",
        "count",
        "length_bins",
        "loss_tokens",
        "padded_tokens",
        "samples",
        "supervised_slots",
        "tokens",
    )

    def __init__(self, longest: int = BINS) -> None:
        self.count = False
        self.batches = self.samples = 0
        self.tokens = self.padded_tokens = self.loss_tokens = self.supervised_slots = 0
        self.bin_tokens = -(-longest // BINS)
        self.length_bins = [0] * BINS

    def add(self, batch: Batch) -> None:
        """Count a batch from what the host knows of it."""
        self.tokens += batch.tokens
        self.padded_tokens += batch.padded_tokens
        self.loss_tokens += batch.loss_tokens
        self.supervised_slots += batch.supervised_slots
        self.samples += len(batch.lengths)
        bins, width, last = self.length_bins, self.bin_tokens, BINS - 1
        for length in batch.lengths:
            bins[min((length - 1) // width, last)] += 1
        self.batches += 1


class BatchPrefetcher:
    """Builds batches of a plan in a thread of its own and hands them out in plan order.

    Args:
        plan: which batch comes where.
        collate: builds a batch; runs only in this object's thread.
        depth: most batches that wait.
        start_index: first place of the plan.
        stop_index: first place that is not built; None goes on until closed.
        recorder: gets batches, tokens, samples, busy and waiting time when its switch `count` is on.
        on_error: called once, in the thread, with what `collate` or `plan` raised; `get` then gives None.
        longest: longest sample, tokens; sets the width of the length bins.
    """

    def __init__(
        self,
        plan: Plan,
        collate: Callable[[BatchSpec], Batch],
        depth: int,
        start_index: int = 0,
        stop_index: int | None = None,
        recorder: WorkerRecorder | None = None,
        on_error: Callable[[BaseException], Any] | None = None,
        longest: int = BINS,
    ) -> None:
        self.capacity = depth
        self.counters = BatchCounters(longest)
        self._plan = plan
        self._collate = collate
        self._next = start_index
        self._stop_index = stop_index
        self._recorder = recorder
        self._on_error = on_error
        self._ready: deque[Batch] = deque()
        self._lock = threading.Lock()
        self._filled = threading.Condition(self._lock)
        self._drawn = threading.Condition(self._lock)
        self._ended = self._waiting = False
        self.thread = threading.Thread(target=self._run, name="prefetcher", daemon=True)

    def start(self) -> None:
        """Begin to build."""
        self.thread.start()

    def get(self) -> Batch | None:
        """The next batch in plan order; waits for it. None once the plan's end is reached, on an error, or
        when closed."""
        with self._lock:
            while not self._ready and not self._ended:
                self._filled.wait()
            if not self._ready:
                return None
            batch = self._ready.popleft()
            self._drawn.notify()
            return batch

    @property
    def built(self) -> int:
        """Place in the plan of the batch in hand."""
        return self._next

    def depth_now(self) -> int:
        """Batches that wait."""
        return len(self._ready)

    def stands_full(self) -> bool:
        """As many batches wait as may, and the next one is built: nothing moves until a target worker
        draws."""
        return self._waiting and len(self._ready) >= self.capacity

    def close(self) -> None:
        """Stop; everyone waiting in `get` gets None. Never waits itself, may be called again and from any
        thread."""
        with self._lock:
            self._end()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; whether it has ended."""
        if self.thread.ident is None:  # never started
            return True
        if self.thread is not threading.current_thread():
            self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def _end(self) -> None:
        self._ended = True
        self._ready.clear()
        self._filled.notify_all()
        self._drawn.notify_all()

    def _run(self) -> None:
        recorder = self._recorder
        with contextlib.nullcontext() if recorder is None else recorder.clock.running():
            self._build_all()

    def _build_all(self) -> None:
        try:
            while self._stop_index is None or self._next < self._stop_index:
                if not self._build():
                    return
                self._next += 1
            with self._lock:  # what is ready is still handed out
                self._ended = True
                self._filled.notify_all()
        except (
            BaseException
        ) as error:  # whatever it is, the run must hear of it and nobody may be left waiting
            self.close()
            if self._on_error is not None:
                self._on_error(error)

    def _build(self) -> bool:
        """Build one batch and put it; false when closed."""
        recorder = self._recorder
        timed = recorder is not None and recorder.count
        began_ns = time.perf_counter_ns() if timed else 0
        batch = self._collate(self._plan.spec(self._next))
        counters = self.counters
        if counters.count:
            counters.add(batch)
        built_ns = time.perf_counter_ns() if timed else 0
        if timed:
            assert recorder is not None
            recorder.wait_out_since_ns = built_ns
        with self._lock:
            while len(self._ready) >= self.capacity and not self._ended:
                self._waiting = True
                self._drawn.wait()
            self._waiting = False
            if self._ended:
                return False
            self._ready.append(batch)
            self._filled.notify()
        if timed:
            assert recorder is not None
            recorder.wait_out_since_ns = 0
            waited_ns = time.perf_counter_ns()
            recorder.wait_out_ns += waited_ns - built_ns
            if recorder.log is not None:
                recorder.log.add("prefetcher.collate", began_ns, built_ns, batch.spec.index)
                recorder.log.add("prefetcher.wait_out", built_ns, waited_ns, batch.spec.index)
                recorder.log.add(PREFETCHED, waited_ns, waited_ns, len(self._ready))
            recorder.busy_ns += built_ns - began_ns
            recorder.batches += 1
            recorder.tokens += batch.tokens
            recorder.samples += len(batch.lengths)
            recorder.step = batch.spec.index
        return True
