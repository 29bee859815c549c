"""Every way that runs here, on operations of which the answer is known."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from bench.syncs.faults import truth
from bench.syncs.faults.truth import CASES, PAGEABLE_CASES, Case, operands, syncs_of
from bench.syncs.ways.fake_device import FakeDeviceWay
from steptime.counting.count import count_syncs
from steptime.counting.ways.gpu_trace import GpuTraceWay
from steptime.counting.ways.modes import ModesWay
from tests.waiting import HANG_S

# What a device without data cannot tell: it has no host index, no copy to the device and no pageable memory.
FAKE_MISSES = PAGEABLE_CASES | {
    "tensor into a device mask",
    "tensor into a host index",
    "read by host index",
    "print",
    "index by a list",
    "tensor from a number",
    "tensor from an array",
    "blocking copy in from pinned memory",
}
FAKE_CANNOT_RUN = {"fused optimizer step", "format"}
# Where no device is named, a move of what is there already is no copy, and a mask from a Python list is on
# the device.
LOOSE_DIFFERS = PAGEABLE_CASES | {
    "to cpu",
    "tensor from a number",
    "tensor from an array",
    "blocking copy in from pinned memory",
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_modes(case: Case) -> None:
    found = syncs_of(ModesWay(), case)
    assert bool(found) == case.waits, found
    assert sum(found.values()) in (0, 1), "counted once, not at every level it passes through"


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name not in FAKE_CANNOT_RUN], ids=lambda case: case.name
)
def test_fake_device(case: Case) -> None:
    found = syncs_of(FakeDeviceWay(), case)
    assert bool(found) == (case.waits and case.name not in FAKE_MISSES), found


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name not in LOOSE_DIFFERS], ids=lambda case: case.name
)
def test_loose_boundary(case: Case) -> None:
    with count_syncs(device="cpu") as syncs:
        case.act(operands(torch.device("cpu")))
        before = syncs.total
        case.act(operands(torch.device("cpu")))
    assert (syncs.total > before) == case.waits, syncs.table()


def test_upstreams_list_is_whole() -> None:
    upstream = [case for case in CASES if case.upstream]
    assert (sum(case.waits for case in upstream), len(upstream)) == (8, 18)


@pytest.fixture(scope="module")
def on_gpu() -> dict[str, dict[str, dict[str, int]]]:
    """What the CUDA ways count, each in a process of its own."""

    def run(way: str) -> dict[str, dict[str, int]]:
        command = [sys.executable, "-m", "bench.syncs.faults.truth", way]
        return json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=HANG_S).stdout
        )

    return {way: run(way) for way in ("GPU trace", "modes", "copy wrappers")}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cuda_ways(case: Case, on_gpu: dict[str, dict[str, dict[str, int]]]) -> None:
    assert bool(on_gpu["modes"][case.name]) == case.waits
    if case.name in PAGEABLE_CASES:
        assert bool(on_gpu["copy wrappers"][case.name]) == case.waits
    else:
        assert bool(on_gpu["GPU trace"][case.name]) == case.waits


def test_gpu_trace_is_unavailable_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert truth.main([GpuTraceWay.name]) == 4
    said = capsys.readouterr()
    assert said.out == ""
    assert "unavailable: no CUDA device" in said.err
