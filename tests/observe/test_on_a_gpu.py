"""What only a GPU can show: event pairs on a real stream, the allocator's counters, NVML. Skipped, with a
count, elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash.config import ObserveConfig
from dflash.device import Device
from dflash.observe.observer import Observer
from dflash.observe.recorder import CudaStageTimer, WorkerRecorder
from dflash.observe.roles import RoleMap
from dflash.observe.syncs.guard import GuardScopes
from tests.observe.parts import ListSink
from tests.waiting import wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def busy(milliseconds: float) -> None:
    """Keep the current stream busy for about so long."""
    torch.cuda._sleep(int(milliseconds * 1e6))


def test_stages_are_timed_on_the_stream_without_waiting_for_it() -> None:
    device = Device("cuda:0")
    with device.active():
        recorder = WorkerRecorder("drafter", 0, device, ring=16)
        timer = recorder.timer("drafter.forward", gpu=True)
        assert isinstance(timer, CudaStageTimer)
        recorder.switch_timers(True)
        recorder.warm()
        device.synchronize()
        inside = [(device.event(timing=True), device.event(timing=True)) for _ in range(8)]
        with GuardScopes("disallow").enter("drafter/0", device):  # a wait of the host would raise
            for begin, end in inside:
                timer.start()
                begin.record()
                busy(20)
                end.record()
                timer.stop()
                recorder.step_boundary()
        device.synchronize()
        recorder.step_boundary()
    assert timer.count == 8
    for value_ns, (begin, end) in zip(timer.ring[:8], inside, strict=True):
        # By the stream's own clock: a stage is as long as what was inside it.
        assert value_ns / 1e6 >= begin.elapsed_time(end) - 0.01 > 0
    assert timer.dropped == 0


def test_no_event_and_no_memory_is_made_in_the_steady_state() -> None:
    device = Device("cuda:0")
    with device.active():
        recorder = WorkerRecorder("drafter", 0, device, ring=8)
        timer = recorder.timer("drafter.forward", gpu=True)
        recorder.switch_timers(True)
        recorder.step_boundary()
        weights = torch.randn(64, 64, device=device.torch)
        out = torch.empty_like(weights)
        before = torch.cuda.memory_stats(device.torch)["num_device_alloc"]
        for _ in range(100):
            timer.start()
            torch.mm(weights, weights, out=out)
            timer.stop()
            recorder.step_boundary()
        device.synchronize()
        assert torch.cuda.memory_stats(device.torch)["num_device_alloc"] == before


def test_the_gpu_and_cuda_collectors_of_a_run(tmp_path: Path) -> None:
    roles = RoleMap(("cuda:0",), ("cuda:0",), ((0, f"GPU-{torch.cuda.get_device_properties(0).uuid}"),))
    sink = ListSink()
    observer = Observer(ObserveConfig(tick_s=0.1, flush_s=0.5), tmp_path, roles, sinks=[sink])
    device = Device("cuda:0")
    recorder = observer.recorder("drafter", 0, device)
    timer = recorder.timer("drafter.forward", gpu=True)
    observer.attach()
    observer.start()
    with device.active():
        held = torch.empty(64 * 2**20, dtype=torch.uint8, device=device.torch)

        def all_seen_after_a_step() -> bool:
            if timer.on:
                timer.start()
            busy(1)
            if timer.on:
                timer.stop()
            recorder.step_boundary()
            keys = [key for row in sink.of("metrics") for key in row.values]
            wanted = ("cuda/0/allocated_gb", "profile/drafter.forward_ms", "gpu/0/mem_used")
            return all(any(key.startswith(one) for key in keys) for one in wanted)

        wait_until(all_seen_after_a_step)
        device.synchronize()
        recorder.step_boundary()
    summary = observer.close()
    assert summary.failed == {}
    values = summary.values
    assert values["cuda/0/allocated_gb"] >= held.numel() / 1e9
    assert values["profile/drafter.forward_ms"] > 0
    assert any(key.startswith("gpu/0/mem_used") for key in values)
    assert not torch.cuda.is_current_stream_capturing()
