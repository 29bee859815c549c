"""What each collector makes of what it reads; what is not known is absent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from dflash.device import Device
from dflash.observe.collectors.base import Sources
from dflash.observe.collectors.batch import BatchCollector
from dflash.observe.collectors.cuda import CudaCollector, Snapshots
from dflash.observe.collectors.pipeline import PipelineCollector, entropy_bits
from dflash.observe.collectors.profile import ProfileCollector
from dflash.observe.collectors.workers import WorkersCollector
from dflash.observe.recorder import WorkerRecorder
from steptime.host_time import lock_unseen
from tests.clock import Clock
from tests.observe.parts import FakeDevice, FakePrefetcher, FakeQueue, recorder_on, sources

SECOND = 1_000_000_000


def on(collector: Any, now_ns: int = 0) -> Any:
    """Switched on and primed at `now_ns`."""
    collector.switch(True)
    assert collector.begin(now_ns) == {}
    return collector


# -- pipeline ------------------------------------------------------------------------------------------------


def test_pipeline_reads_depth_mix_age_and_deficit() -> None:
    source = sources()
    source.queue, source.prefetcher = FakeQueue(), FakePrefetcher(capacity=4, ready=3)
    collector = on(PipelineCollector(source))
    assert source.queue.count
    source.queue.buckets = {128: 3, 256: 3, 512: 0}
    source.queue.oldest = 4 * SECOND
    values = collector.sample(6 * SECOND)
    assert values["pipeline/hs_queue_depth"] == 6
    assert values["pipeline/hs_queue_fill_ratio"] == 0.25
    assert values["pipeline/hs_ready_deficit"] == 4
    assert values["pipeline/hs_bucket_nonempty_count"] == 2
    assert values["pipeline/hs_bucket_entropy"] == pytest.approx(1.0)
    assert values["pipeline/hs_oldest_age_s"] == pytest.approx(2.0)
    assert values["pipeline/prefetch_fill_ratio"] == 0.75
    assert "pipeline/target_to_drafter_batch_ratio" not in values


def test_pipeline_of_an_empty_queue_has_no_age_and_no_entropy() -> None:
    source = sources()
    source.queue = FakeQueue()
    values = on(PipelineCollector(source)).sample(SECOND)
    assert values["pipeline/hs_queue_depth"] == 0
    assert "pipeline/hs_oldest_age_s" not in values
    assert "pipeline/hs_bucket_entropy" not in values
    assert "pipeline/prefetch_fill_ratio" not in values


def test_pipeline_counts_a_wait_while_it_lasts_and_only_once() -> None:
    source = sources()
    queue = source.queue = FakeQueue()
    collector = on(PipelineCollector(source))
    queue.counters.consumer_since_ns[0] = int(0.5 * SECOND)
    first = collector.sample(SECOND)["pipeline/consumer_wait_s"]
    second = collector.sample(2 * SECOND)["pipeline/consumer_wait_s"]
    queue.counters.consumer_since_ns[0] = 0
    queue.counters.consumer_wait_ns += 2 * SECOND
    queue.counters.put_count, queue.counters.get_count = 6, 4
    third = collector.sample(3 * SECOND)
    assert (first, second, third["pipeline/consumer_wait_s"]) == pytest.approx((0.5, 1.0, 0.5))
    assert third["pipeline/producer_wait_s"] == 0.0
    assert third["pipeline/target_to_drafter_batch_ratio"] == 1.5


def test_pipeline_switched_off_takes_the_clocks_off_the_queue() -> None:
    source = sources()
    source.queue = FakeQueue()
    collector = on(PipelineCollector(source))
    collector.switch(False)
    assert not source.queue.count


def test_entropy() -> None:
    assert entropy_bits([5]) == 0.0
    assert entropy_bits([2, 2, 2, 2]) == pytest.approx(2.0)


# -- workers -------------------------------------------------------------------------------------------------


def make_workers() -> tuple[WorkersCollector, list[WorkerRecorder]]:
    source = sources(targets=("cpu", "cpu:1"), drafters=("cpu:2",))
    source.recorders = [WorkerRecorder("target", i, Device("cpu")) for i in range(2)]
    source.recorders.append(WorkerRecorder("drafter", 0, Device("cpu")))
    return on(WorkersCollector(source)), source.recorders


def test_workers_reports_every_target_and_drafter() -> None:
    collector, (first, second, drafter) = make_workers()
    assert first.count
    assert drafter.count
    first.tokens, first.batches, first.busy_ns = 3000, 3, SECOND
    second.tokens, second.batches, second.busy_ns, second.wait_out_ns = 1000, 1, SECOND // 2, SECOND
    drafter.tokens, drafter.step, drafter.wait_in_ns, drafter.busy_ns = (
        4000,
        17,
        SECOND // 2,
        int(1.5 * SECOND),
    )
    values = collector.sample(2 * SECOND)
    assert values["target/0/tokens_per_second"] == 1500
    assert values["target/0/capacity_tokens_per_second"] == 3000
    assert values["target/1/capacity_tokens_per_second"] == 2000
    assert values["target/1/wait_out_s"] == 1.0
    assert values["target/skew"] == 1.5
    assert values["drafter/0/step"] == 17
    assert values["drafter/0/wait_in_s"] == 0.5
    assert values["drafter/0/busy_s"] == 1.5
    assert "drafter/skew" not in values


def test_workers_tells_what_share_of_the_matmul_rate_was_asked_for() -> None:
    source = sources(("cuda:0",), ("cuda:1", "cuda:2"), rates=tuple((f"cuda:{i}", 1e9) for i in range(3)))
    source.recorders = [WorkerRecorder("target", 0, Device("cpu"))]
    source.recorders += [WorkerRecorder("drafter", i, Device("cpu")) for i in range(2)]
    target, first, second = source.recorders
    target.flops = first.flops = 7 * 10**9  # before it was switched on
    collector = on(WorkersCollector(source))
    target.flops += 600_000_000
    first.flops += 300_000_000
    second.flops += 100_000_000
    values = collector.sample(2 * SECOND)
    assert values["target/mfu"] == pytest.approx(0.3)
    assert values["drafter/mfu"] == pytest.approx(0.1)
    assert values["train/mfu"] == pytest.approx(0.5 / 3)
    target.flops += 2 * 10**9
    assert collector.sample(4 * SECOND)["train/mfu"] == pytest.approx(1 / 3)


def test_a_look_for_which_training_stands_still_is_in_no_share(clock: Clock) -> None:
    source = sources(("cuda:0",), ("cuda:1",), rates=(("cuda:0", 1e9), ("cuda:1", 1e9)))
    source.recorders = [
        WorkerRecorder("target", 0, Device("cpu")),
        WorkerRecorder("drafter", 0, Device("cpu")),
    ]
    drafter = source.recorders[1]
    collector, began_ns = WorkersCollector(source), clock.now_ns
    collector.switch(True)
    collector.begin(began_ns)
    drafter.flops += 500_000_000
    clock.advance(1.0)
    with source.standing:
        clock.advance(1.0)
        values = collector.sample(clock.now_ns)
        assert values["drafter/mfu"] == pytest.approx(0.5)  # while the look lasts
        assert values["host/standing_s"] == pytest.approx(1.0)
        clock.advance(2.0)
        values = collector.sample(clock.now_ns)
        assert "drafter/mfu" not in values  # nothing but the look
        assert values["host/standing_s"] == pytest.approx(2.0)
    clock.advance(1.0)
    drafter.flops += 250_000_000
    values = collector.sample(clock.now_ns)
    assert values["drafter/mfu"] == pytest.approx(0.25)
    assert "host/standing_s" not in values
    clock.advance(1.0)
    assert collector.sample(clock.now_ns)["drafter/mfu"] == 0.0


def test_a_look_before_the_collector_was_on_is_none_of_its_time(clock: Clock) -> None:
    source = sources(("cuda:0",), ("cuda:1",))
    with source.standing:
        clock.advance(5.0)
    collector = WorkersCollector(source)
    collector.switch(True)
    collector.begin(clock.now_ns)
    clock.advance(1.0)
    assert "host/standing_s" not in collector.sample(clock.now_ns)


def test_workers_without_a_rate_know_no_share() -> None:
    collector, _ = make_workers()
    assert not [key for key in collector.sample(SECOND) if key.endswith("mfu")]


def test_workers_without_progress_has_no_capacity_rather_than_zero() -> None:
    collector, _ = make_workers()
    values = collector.sample(SECOND)
    assert values["target/0/tokens"] == 0
    assert "target/0/capacity_tokens_per_second" not in values
    assert "target/skew" not in values


def test_workers_sees_a_worker_that_is_stuck() -> None:
    collector, (_, _, drafter) = make_workers()
    drafter.wait_in_since_ns = SECOND // 4
    assert collector.sample(SECOND)["drafter/0/wait_in_s"] == 0.75
    assert collector.sample(2 * SECOND)["drafter/0/wait_in_s"] == 1.0


def test_workers_tell_the_host_time_of_threads_that_run_that_are_to_begin_and_that_have_ended() -> None:
    source = sources(targets=("cpu", "cpu:1"), drafters=("cpu:2",))
    source.recorders = [WorkerRecorder("target", i, Device("cpu")) for i in range(2)]
    source.recorders += [
        WorkerRecorder("drafter", 0, Device("cpu")),
        WorkerRecorder("prefetcher", 0, Device("cpu")),
    ]
    early, late, _never, prefetcher = (one.clock for one in source.recorders)
    early._ended_ns, prefetcher._ended_ns = 5 * SECOND, SECOND
    collector = on(WorkersCollector(source))
    early._ended_ns, late._ended_ns, prefetcher._ended_ns = 7 * SECOND, SECOND // 2, 3 * SECOND
    values = collector.sample(SECOND)
    assert values["target/0/host_s"] == 2.0  # what it took before the switch is not counted
    assert values["target/1/host_s"] == 0.5  # it began behind the switch: all of it
    assert "drafter/0/host_s" not in values
    assert values["host/prefetcher_s"] == 2.0
    assert values["host/process_s"] > 0.0
    assert collector.sample(2 * SECOND)["target/0/host_s"] == 0.0


def test_workers_tell_how_often_the_lock_was_found_held_and_are_charged_for_looking() -> None:
    collector, _ = make_workers()
    lock = collector.sources.lock
    assert lock.on == (not lock_unseen())
    assert "host/lock_held_ratio" not in collector.sample(SECOND)
    before = collector.cpu_ns
    lock.wakes, lock.held, lock.cpu_ns = 8, 6, 1000
    values = collector.sample(2 * SECOND)
    assert (values["host/lock_wakes"], values["host/lock_held_ratio"]) == (8.0, 0.75)
    assert collector.cpu_ns - before == 1000
    lock.wakes, lock.held = 12, 6
    assert collector.sample(3 * SECOND)["host/lock_held_ratio"] == 0.0
    collector.switch(False)
    assert not lock.on


def test_workers_on_cuda_take_busy_time_from_the_stream_or_not_at_all() -> None:
    source = sources(targets=("cuda:0",))
    device = FakeDevice()
    recorder = recorder_on(device)
    timer = recorder.timer("target.model_forward", gpu=True)
    source.recorders = [recorder]
    recorder.warm()
    collector = on(WorkersCollector(source))
    recorder.busy_ns = SECOND
    assert "target/0/busy_s" not in collector.sample(SECOND)
    recorder.switch_timers(True)
    collector.sample(2 * SECOND)
    timer.start()
    timer.stop()
    device.gpu.finish()
    recorder.step_boundary()
    assert collector.sample(3 * SECOND)["target/0/busy_s"] == pytest.approx(0.001)


# -- batch ---------------------------------------------------------------------------------------------------


def make_batch(lengths: tuple[int, ...], bucket: int, loss_tokens: int) -> Any:
    tokens = sum(lengths)
    padded = bucket * len(lengths)
    return SimpleNamespace(
        tokens=tokens, padded_tokens=padded, loss_tokens=loss_tokens, supervised_slots=0, lengths=lengths
    )


def test_batch_reports_from_the_prefetchers_counts() -> None:
    source = sources()
    prefetcher = source.prefetcher = FakePrefetcher(longest=512)
    prefetcher.counters.add(make_batch((1, 1), 128, 1))
    collector = on(BatchCollector(source))
    prefetcher.counters.add(make_batch((100, 120), 128, 110))
    prefetcher.counters.add(make_batch((200, 220), 256, 100))
    values = collector.sample(SECOND)
    assert values["batch/batches"] == 2
    assert values["batch/tokens"] == 640
    assert values["batch/loss_token_fraction"] == pytest.approx(210 / 640)
    assert values["batch/padding_efficiency"] == pytest.approx(640 / 768)
    assert values["batch/size"] == 2
    assert values["batch/length_p50"] == 120
    assert values["batch/length_p95"] == 220
    assert collector.flush()["batch/length_p50"] == 120
    assert collector.flush() == {}


def test_batch_of_a_quiet_tick_has_no_ratios() -> None:
    source = sources()
    source.prefetcher = FakePrefetcher()
    values = on(BatchCollector(source)).sample(SECOND)
    assert values == {"batch/batches": 0.0, "batch/tokens": 0.0, "batch/padded_tokens": 0.0}


def test_batch_switched_off_stops_the_counting() -> None:
    source = sources()
    source.prefetcher = FakePrefetcher()
    collector = on(BatchCollector(source))
    assert source.prefetcher.counters.count
    collector.switch(False)
    assert not source.prefetcher.counters.count


# -- cuda ----------------------------------------------------------------------------------------------------


def snapshot(allocs: int = 5, **left_out: bool) -> dict[str, Any]:
    stats: dict[str, Any] = {
        "allocated_bytes": {"all": {"current": 2_000_000_000, "peak": 3_000_000_000}},
        "reserved_bytes": {"all": {"current": 4_000_000_000, "peak": 5_000_000_000}},
        "inactive_split_bytes": {"all": {"current": 500_000_000}},
        "num_alloc_retries": 1,
        "num_device_alloc": allocs,
    }
    return {key: value for key, value in stats.items() if key not in left_out}


def on_cuda(source: Sources) -> CudaCollector:
    """The collector as the observer makes it: every worker has its instrument before the switch is thrown."""
    collector = CudaCollector(source)
    for recorder in source.recorders:
        collector.equip(recorder)
    return on(collector)


def asked(recorder: WorkerRecorder) -> bool:
    return any(one.on for one in recorder.instruments if isinstance(one, Snapshots))


def answer(recorder: WorkerRecorder, stats: dict[str, Any]) -> None:
    """A worker's step boundary, where the allocator has these statistics."""
    with mock.patch("torch.cuda.memory.memory_stats_as_nested_dict", return_value=stats):
        recorder.step_boundary()


def test_cuda_reports_what_a_worker_left_and_asks_once_a_tick() -> None:
    source = sources(targets=("cuda:3",))
    recorder = recorder_on(FakeDevice(3))
    source.recorders = [recorder]
    collector = on_cuda(source)
    answer(recorder, snapshot(allocs=5))
    first = collector.sample(SECOND)
    assert first["cuda/3/allocated_gb"] == 2.0
    assert first["cuda/3/reserved_gb"] == 4.0
    assert first["cuda/3/max_reserved_gb"] == 5.0
    assert first["cuda/3/inactive_split_gb"] == 0.5
    assert "cuda/3/device_allocs" not in first
    answer(recorder, snapshot(allocs=8))
    second = collector.sample(2 * SECOND)
    assert second["cuda/3/device_allocs"] == 3
    assert second["cuda/3/alloc_retries"] == 0
    # No step since: nothing to say, rather than the old numbers again.
    assert collector.sample(3 * SECOND) == {}
    assert collector.instruments()[0] == 2


def test_cuda_asks_nobody_once_it_is_off() -> None:
    source = sources(targets=("cuda:0",))
    source.recorders = [recorder_on(FakeDevice(0))]
    collector = on_cuda(source)
    collector.switch(False)
    assert not asked(source.recorders[0])


def test_cuda_asks_another_worker_of_the_device_when_one_has_ended() -> None:
    source = sources(targets=("cuda:0",), drafters=("cuda:0",))
    target, drafter = recorder_on(FakeDevice(0)), recorder_on(FakeDevice(0), "drafter")
    source.recorders = [target, drafter]
    collector = on_cuda(source)
    assert asked(target)
    assert not asked(drafter)
    collector.sample(SECOND)
    assert not asked(target)
    answer(drafter, snapshot())
    assert "cuda/0/allocated_gb" in collector.sample(2 * SECOND)


def test_cuda_leaves_out_what_an_allocator_does_not_tell() -> None:
    source = sources(targets=("cuda:0",))
    recorder = recorder_on(FakeDevice(0))
    source.recorders = [recorder]
    collector = on_cuda(source)
    answer(recorder, snapshot(inactive_split_bytes=True, num_device_alloc=True))
    values = collector.sample(SECOND)
    assert "cuda/0/inactive_split_gb" not in values
    assert "cuda/0/allocated_gb" in values


def test_cuda_on_the_cpu_says_nothing() -> None:
    source = sources()
    source.recorders = [WorkerRecorder("target", 0, Device("cpu"))]
    assert on_cuda(source).sample(SECOND) == {}


# -- profile -------------------------------------------------------------------------------------------------


def test_profile_merges_the_workers_of_a_role() -> None:
    source = sources(targets=("cpu", "cpu:1"))
    source.recorders = [WorkerRecorder("target", index, Device("cpu")) for index in range(2)]
    timers = [recorder.timer("target.model_forward", gpu=True) for recorder in source.recorders]
    collector = on(ProfileCollector(source))
    assert all(timer.on for timer in timers)
    timers[0].add(2_000_000)
    timers[1].add(4_000_000)
    values = collector.sample(SECOND)
    assert values["profile/target.model_forward_ms"] == pytest.approx(3.0)
    assert values["profile/target.model_forward_ms_max"] == pytest.approx(4.0)
    assert values["profile/target.model_forward_count"] == 2
    assert collector.sample(2 * SECOND) == {}
    timers[0].add(9_000_000)
    collector.sample(3 * SECOND)
    window = collector.flush()
    assert window["profile/target.model_forward_count"] == 3
    assert window["profile/target.model_forward_ms"] == pytest.approx(5.0)
    assert collector.flush() == {}


def test_profile_switched_on_again_leaves_out_what_was_before() -> None:
    source = sources()
    source.recorders = [WorkerRecorder("target", 0, Device("cpu"))]
    timer = source.recorders[0].timer("target.model_forward")
    collector = on(ProfileCollector(source))
    timer.add(1_000_000)
    collector.switch(False)
    timer.add(1_000_000)
    collector.switch(True)
    assert collector.fresh
    assert collector.begin(SECOND) == {}
    timer.add(5_000_000)
    assert collector.sample(2 * SECOND)["profile/target.model_forward_count"] == 1
