"""A fault of each kind, planted into the pipeline, is found with its place."""

from __future__ import annotations

import re

import pytest

from dflash.data.collate import Collator
from dflash.observe.syncs.guard import SyncNotAllowed
from dflash.pipeline.supervisor import WorkerFailed
from steptime.simulate import Misuse, Race
from tests.pipeline.simulated.parts import devices, simulated
from tests.waiting import HANG_S

pytestmark = [pytest.mark.timeout(5 * HANG_S), pytest.mark.fault]

RECEIVER = r"dflash/pipeline/hand_over\.py:\d+"
TARGET = r"dflash/pipeline/target_worker\.py:\d+"


def one_event_for_all_drafters(trainer):
    event = trainer.replicas[0].device.event()
    for worker in trainer.drafter_workers:
        for buffer in trainer.target_workers[0].buffers:
            worker._receiver._free[buffer] = event


def given_back_before_its_last_read(trainer):
    receiver = trainer.drafter_workers[0]._receiver
    receive, done = receiver.receive, receiver.done

    def early(item):
        parts = receive(item)
        done(item)
        return parts

    receiver.receive, receiver.done = early, lambda item: None


def packed_on_a_stream_that_does_not_wait(trainer):
    worker = trainer.target_workers[0]
    packed, stream = worker._packed, worker.device.new_stream()

    def elsewhere(*arguments):
        with worker.device.on(stream):
            return packed(*arguments)

    worker._packed = elsewhere


def rewritten_without_a_wait(trainer):
    receiver = trainer.drafter_workers[0]._receiver

    def unmarked(buffer):
        buffer.freed = None

    receiver._free_after_reads = unmarked


def ring_read_before_its_event(trainer):
    class Fired:
        def record(self, stream=None):
            pass

        def query(self):
            return True

    late = trainer.drafter_workers[0].late
    late._events = [Fired() for _ in late._events]


def batches_in_pageable_memory(trainer):
    trainer._collator = Collator(trainer.inputs.dataset, trainer.inputs.geometry, pin=False)


def embedding_on_the_targets_device(trainer):
    object.__setattr__(trainer.replicas[0], "embedding", trainer._targets[0].embedding)


def freed_while_the_step_reads_it(trainer, *, said=False):
    worker = trainer.drafter_workers[0]
    receive, stream = worker._receiver.receive, worker.device.new_stream()

    def copied_aside(item):
        features, last = receive(item)
        stream.wait_stream(worker.device.stream)
        with worker.device.on(stream):
            features = features.clone()
        worker.device.stream.wait_stream(stream)
        if said:
            features.record_stream(worker.device.stream)
        return features, last

    worker._receiver.receive = copied_aside


def slow(*values):
    """One of many like cases."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("layout", "plant", "kind", "words"),
    [
        slow((1, 2), one_event_for_all_drafters, Misuse, rf"Event device \d does not match .* {RECEIVER}"),
        slow(
            (1,),
            given_back_before_its_last_read,
            Race,  # whichever of the two is first on the clock
            rf"by drafter/0 .*; then, write: .* {TARGET}|first, .* {TARGET} .*; then, read: .* by drafter/0",
        ),
        ((1, 1), packed_on_a_stream_that_does_not_wait, Race, rf"read: aten::cat by target/0 .* {TARGET}"),
        ((1, 1), rewritten_without_a_wait, Race, rf"by drafter/0 .* {RECEIVER} .*; then, write: .*"),
        slow(
            (1, 1), ring_read_before_its_event, Race, r"in host memory: .*scalars\.py:\d+ .*scalars\.py:\d+"
        ),
        slow((1, 1), batches_in_pageable_memory, SyncNotAllowed, rf"target/0 .* pageable copy at {TARGET}"),
        slow(
            (1, 1),
            embedding_on_the_targets_device,
            Misuse,
            r"found sim:0 and sim:1: .* by drafter/0 .*\.py:\d+",
        ),
        slow((1, 1), freed_while_the_step_reads_it, Race, r"then, freed by drafter/0: the next allocation"),
    ],
    ids=lambda value: getattr(value, "__name__", None) if callable(value) else "",
)
def test_a_planted_fault_ends_the_run_with_its_place(tmp_path, layout, plant, kind, words):
    settings = devices(1, 1, together=True) if layout == (1,) else devices(*layout)
    with pytest.raises(WorkerFailed) as failed:
        simulated(tmp_path, *settings, "train.steps=6", "queue.capacity=1", prepare=plant, queries=20)
    error = failed.value.failure.error
    assert isinstance(error, kind), error
    assert re.search(words, str(error)), error
    assert failed.value.failure.role.startswith(("drafter/", "target/"))


@pytest.mark.slow
def test_memory_that_is_said_to_be_in_use_is_no_fault(tmp_path):
    ended = simulated(
        tmp_path, *devices(1, 1), prepare=lambda trainer: freed_while_the_step_reads_it(trainer, said=True)
    )
    assert ended.simulation.faults == []
