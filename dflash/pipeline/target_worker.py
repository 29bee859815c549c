"""One thread, one target: batches in, packed hidden states out."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from dflash.data.batch import Batch
from dflash.device import Device
from dflash.observe.syncs import mark_step
from dflash.observe.timeline.log import PREFETCHED, PUT, QUEUE
from dflash.pipeline.hand_over import Room, Staging, copied
from dflash.pipeline.hidden_queue import Buffer, BufferPool, HiddenBatch, SharedHiddenStateQueue

if TYPE_CHECKING:
    from dflash.data.prefetch import BatchPrefetcher
    from dflash.models.target import Target
    from dflash.observe.recorder import WorkerRecorder
    from dflash.observe.timeline.log import SpanLog


class TargetWorker:
    """Runs the frozen target on its device and packs the tapped states into preallocated buffers.

    One stream runs the target and packs; the drafter waits for the event recorded behind the packing.
    (Packing on a second stream without the right waits is what gave NaN in the past.) Where a drafter cannot
    reach this device, a second stream copies what was packed to pinned memory (`hand_over`).

    Args:
        buffers: number of buffers; each holds the largest batch, `[batch, max_length, taps*hidden]`.
        keep_last: also hand over the target's last hidden states (distillation).
        through_host: the buffers are pinned host memory.
    """

    def __init__(
        self,
        index: int,
        target: Target,
        device: Device,
        recorder: WorkerRecorder,
        prefetcher: BatchPrefetcher,
        queue: SharedHiddenStateQueue,
        *,
        buffers: int,
        batch_size: int,
        max_length: int,
        dtype: torch.dtype,
        keep_last: bool = False,
        through_host: bool = False,
    ) -> None:
        self.index, self.device = index, device
        self._target, self._prefetcher, self._queue, self._recorder = target, prefetcher, queue, recorder
        self._keep_last = keep_last
        self.pool = BufferPool()
        positions = batch_size * max_length
        hidden = target.embedding.shape[1]
        self._width = hidden * len(target.layer_ids)
        self.room = Room(positions * self._width, positions * hidden if keep_last else None, dtype)
        self.through_host = through_host
        with device.active():
            self._staging = Staging(device, self.room) if through_host else None
            self.buffers = [self.room.buffer(device, self.pool, pinned=through_host) for _ in range(buffers)]
        for buffer in self.buffers:
            self.pool.put(buffer)
        self._forward = recorder.timer("target.model_forward", gpu=True)
        self._pack = recorder.timer("target.pack_hidden", gpu=True)
        self._hand_over = recorder.timer("target.cpu_copy_enqueue")

    def run(self) -> None:
        """Until the prefetcher has no more, or the run stops."""
        try:
            with self._recorder.clock.running():
                while self.step():
                    pass
        finally:
            self._queue.producer_done()

    def end(self) -> None:
        """The loop is over: what of its spans the device has passed by now is read."""
        self._recorder.step_boundary()

    def step(self) -> bool:
        """One batch. False when there is none left."""
        recorder = self._recorder
        wanted_ns = time.perf_counter_ns() if recorder.count else 0
        # A wait in progress shows on the dashboard; it is added up before anything else, so that none shows
        # twice.
        recorder.wait_in_since_ns = wanted_ns
        batch = self._prefetcher.get()
        started_ns = time.perf_counter_ns() if wanted_ns else 0
        recorder.wait_in_since_ns = 0
        recorder.wait_in_ns += started_ns - wanted_ns
        if batch is None:
            return False
        recorder.step = batch.spec.index
        mark_step(batch.spec.index)
        recorder.wait_out_since_ns = started_ns
        buffer = self.pool.take()
        pooled_ns = time.perf_counter_ns() if wanted_ns else 0
        recorder.wait_out_since_ns = 0
        recorder.wait_out_ns += pooled_ns - started_ns
        if buffer is None:
            return False
        item = self._run_target(batch, buffer)
        packed_ns = time.perf_counter_ns() if wanted_ns else 0
        recorder.busy_ns += packed_ns - pooled_ns
        recorder.wait_out_since_ns = packed_ns
        handed = self._queue.put(item, self.index)
        recorder.wait_out_since_ns = 0
        if not handed:
            return False
        if wanted_ns:
            handed_ns = time.perf_counter_ns()
            recorder.wait_out_ns += handed_ns - packed_ns
            recorder.batches += 1
            recorder.samples += len(batch.lengths)
            recorder.tokens += batch.tokens
            recorder.flops += batch.flops[0]
            if recorder.log is not None:
                self._log(recorder.log, item, (wanted_ns, started_ns, pooled_ns, packed_ns, handed_ns))
        recorder.step_boundary()
        return True

    def _log(self, log: SpanLog, item: HiddenBatch, moments: tuple[int, int, int, int, int]) -> None:
        """One batch, for the timeline. The draw may be in the log before the put, which it came behind."""
        wanted_ns, started_ns, pooled_ns, packed_ns, handed_ns = moments
        batch = item.batch.spec.index
        log.add("target.wait_in", wanted_ns, started_ns, batch)
        log.add(PREFETCHED, started_ns, started_ns, self._prefetcher.depth_now())
        log.add("target.wait_buffer", started_ns, pooled_ns, batch)
        log.add("target.batch", pooled_ns, packed_ns, batch)
        log.add("target.wait_out", packed_ns, handed_ns, batch)
        log.add(PUT, item.put_ns, item.put_ns, batch)
        log.add(QUEUE, handed_ns, handed_ns, self._queue.depth())

    def hidden_states(self, batch: Batch) -> HiddenBatch:
        """A batch's item without the queue, for the warm-up."""
        buffer = self.pool.take()
        assert buffer is not None
        return self._run_target(batch, buffer)

    def _run_target(self, batch: Batch, buffer: Buffer) -> HiddenBatch:
        forward, pack, hand_over = self._forward, self._pack, self._hand_over
        ids = batch.input_ids.to(self.device.torch, non_blocking=True)
        documents = None if batch.documents is None else batch.documents.to(self.device.torch)
        if forward.on:
            forward.start()
        # It takes less of the host than no_grad, see docs/performance.md. What leaves it is packed into a
        # buffer from outside, which autograd may save.
        with torch.inference_mode():
            if self._keep_last:
                taps, last = self._target.taps_and_last(ids, documents)
            else:
                taps, last = self._target.taps(ids, documents), None
        if forward.on:
            forward.stop()
        staging = self._staging
        place = buffer if staging is None else staging.place()
        if staging is None and buffer.freed is not None:
            buffer.freed.wait()
        if pack.on:
            pack.start()
        features, last_hidden = self._packed(batch, place, taps, last)
        if pack.on:
            pack.stop()
        if hand_over.on:
            hand_over.start()
        if staging is None:
            buffer.ready.record()
        else:
            features, last_hidden = staging.send(features, last_hidden, buffer)
        item = HiddenBatch(batch, features, buffer, self.index, last_hidden)
        if hand_over.on:
            hand_over.stop()
        return item

    def _packed(
        self, batch: Batch, place: Buffer, taps: tuple[torch.Tensor, ...], last: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows, length = batch.input_ids.shape
        features = place.memory[: rows * length * self._width].view(rows, length, self._width)
        torch.cat(taps, dim=-1, out=features)
        if last is None or place.last is None:
            return features, None
        return features, copied(last, place.last)
