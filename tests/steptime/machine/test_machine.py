"""The machine's key, its state, and when it is unfit. NVML is a stand-in; the processes are real ones."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from steptime.errors import UserError
from steptime.machine import identity, state
from steptime.machine.gpu_watch import GpuWatch
from steptime.measure.run import Asked, measure
from steptime.progress import Reporter
from steptime.records.types import GpuState, MachineState
from steptime.subjects.spin import Noise
from steptime.subjects.spin_pairs import Cost, SpinPairs
from tests.clock import Clock

GPUS = [("NVIDIA RTX PRO 6000", "aaaa"), ("NVIDIA RTX PRO 6000", "bbbb")]


class Nvml:
    """As much of pynvml as identity.py asks for. A value that is an exception is raised."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, uuids: list[str], **values: Any) -> None:
        self.uuids = uuids
        self.values = {
            "reasons": 0x4,
            "pids": [],
            "power": 400_000,
            "clock": 1800,
            "driver": "580.1",
        } | values
        self.opened = self.closed = 0
        self.lost: set[int] = set()
        self.names = [b"NVIDIA H200"] * len(uuids)

    def _give(self, name: str) -> Any:
        value = self.values[name]
        if isinstance(value, Exception):
            raise value
        return value

    def nvmlInit(self) -> None:
        self.opened += 1
        if "init" in self.values:
            raise self.values["init"]

    def nvmlShutdown(self) -> None:
        self.closed += 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.lost:
            raise RuntimeError("GPU is lost")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return self.nvmlDeviceGetHandleByIndex(self.uuids.index(uuid))

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return self.uuids[handle]

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return self.names[handle]

    def nvmlSystemGetDriverVersion(self) -> str:
        return str(self._give("driver"))

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13020

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return int(self._give("clock"))

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:
        return 1980

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:
        return 55

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return int(self._give("power"))

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        return 700_000

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return int(self._give("reasons"))

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        pids = self._give("pids")
        return [SimpleNamespace(pid=pid) for pid in (pids[handle] if isinstance(pids, dict) else pids)]


def key(
    gpus: list[tuple[str, str]] = GPUS, cpu: str = "AMD EPYC 9575F", cpus: int = 64, **versions: str
) -> str:
    return identity.describe(gpus, cpu, cpus, versions).key


def test_versions_and_a_reboot_do_not_change_the_key() -> None:
    """GPUs may be counted in another order after a reboot; Python, torch and the driver may be newer."""
    assert key(python="3.11.7", torch="2.11", driver="570") == key(
        GPUS[::-1], python="3.14.0", torch="2.13", driver="580"
    )


@pytest.mark.parametrize(
    "other",
    [
        {"gpus": [GPUS[0], ("NVIDIA RTX PRO 6000", "cccc")]},  # same model, another card
        {"gpus": GPUS[:1]},
        {"gpus": [*GPUS, ("NVIDIA RTX PRO 6000", "cccc")]},
        {"gpus": [("NVIDIA H200", uuid) for _, uuid in GPUS]},
        {"gpus": []},
        {"cpu": "AMD EPYC 9655"},
        {"cpus": 32},
    ],
)
def test_other_hardware_changes_the_key(other: dict[str, Any]) -> None:
    assert key(**other) != key()


def test_key_is_a_folder_name_that_can_be_read() -> None:
    assert key().startswith("2x-rtx-pro-6000-")
    assert identity.describe([], "Intel(R) Xeon(R) CPU @ 2.10GHz", 2, {}).key.startswith("cpu-intel-xeon-")
    assert identity.identify(nvml=Nvml([])).key.replace("-", "").replace(".", "").isalnum()


def test_identify_hashes_uuids_and_creates_no_cuda_context() -> None:
    nvml = Nvml(["GPU-1", "GPU-2"])
    found = identity.identify(nvml=nvml)
    assert [model for model, _ in found.gpus] == ["NVIDIA H200"] * 2
    assert "GPU-1" not in str(found)
    assert (found.versions["driver"], found.versions["cuda driver"]) == ("580.1", "13.2")
    assert (nvml.opened, nvml.closed) == (1, 1)
    imports = "import sys; from steptime.machine import identity, state"
    code = f"{imports}; identity.identify(); state.read_state(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_driver_is_a_machine_without_gpus() -> None:
    assert identity.identify(nvml=Nvml(["GPU-1"], init=RuntimeError("driver not loaded"))).gpus == ()


def test_a_value_that_nvml_does_not_give_is_none() -> None:
    nvml = Nvml(
        ["GPU-1"],
        power=RuntimeError("not supported"),
        pids=RuntimeError("no permission"),
        reasons=RuntimeError("no"),
    )
    (gpu,) = state.read_gpus(frozenset({1}), nvml=nvml)
    assert (gpu.power_w, gpu.foreign_processes, gpu.throttle_reasons) == (None, None, ())
    assert (gpu.sm_clock_mhz, gpu.power_limit_w) == (1800, 700.0)


def test_other_processes_on_the_gpu_are_counted_ours_are_not() -> None:
    me = os.getpid()
    assert state.read_gpus(frozenset({me}), nvml=Nvml(["G"], pids=[me]))[0].foreign_processes == 0
    assert state.read_gpus(frozenset({me}), nvml=Nvml(["G"], pids=[me, 1]))[0].foreign_processes == 1
    assert state.read_gpus(frozenset({me}), nvml=Nvml(["G"], pids=[1]))[0].foreign_processes == 1


def test_ids_from_outside_the_pid_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container NVML tells the host's process ids: as many as we have CUDA processes are taken for
    ours."""
    unknown = [4_194_300, 4_194_301]
    monkeypatch.setattr(state, "_uses_cuda", lambda pid: pid == os.getpid())
    tree = frozenset({os.getpid()})
    assert state.read_gpus(tree, nvml=Nvml(["G"], pids=unknown[:1]))[0].foreign_processes == 0
    assert state.read_gpus(tree, nvml=Nvml(["G"], pids=unknown))[0].foreign_processes == 1


def test_process_tree_holds_children() -> None:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as child:
        try:
            assert {os.getpid(), child.pid} <= state.process_tree()
            assert 1 not in state.process_tree()
        finally:
            child.kill()


def test_quota_and_throttling_from_both_control_group_versions(tmp_path: Path) -> None:
    assert identity.cpu_quota(tmp_path) is None
    assert state.throttled_seconds(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 5\nthrottled_usec 2500000\n")
    assert identity.cpu_quota(tmp_path) == 1.5
    assert state.throttled_seconds(tmp_path) == 2.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert identity.cpu_quota(tmp_path) is None
    old = tmp_path / "old"
    (old / "cpu").mkdir(parents=True)
    (old / "cpu/cpu.cfs_quota_us").write_text("200000\n")
    (old / "cpu/cpu.cfs_period_us").write_text("100000\n")
    (old / "cpu/cpu.stat").write_text("throttled_time 3000000000\n")
    assert (identity.cpu_quota(old), state.throttled_seconds(old)) == (2.0, 3.0)


def test_own_work_is_counted_children_included(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """User and system time of this process, of those below it, and of all that they have waited for."""
    me = os.getpid()
    seconds = {me: (1, 2, 4, 8), me + 1: (16, 32, 64, 128), me + 2: (1000, 1000, 1000, 1000)}
    real = psutil.Process

    class Process:
        def __init__(self, pid: int = me) -> None:
            self.pid = pid

        def children(self, recursive: bool) -> list[Process]:
            return [Process(me + 1)] if recursive else []

        def cpu_times(self) -> SimpleNamespace:
            names = ("user", "system", "children_user", "children_system")
            return SimpleNamespace(**dict(zip(names, seconds[self.pid], strict=True)))

        def cpu_affinity(self) -> list[int]:
            return real().cpu_affinity()

    monkeypatch.setattr(psutil, "Process", Process)
    before = state.read_state(nvml=Nvml([]))
    assert before.own_cpu_s == 255
    seconds[me] = (2, 2, 4, 8)
    clock.advance(3.0)
    after = state.read_state(nvml=Nvml([]))
    assert after.own_cpu_s - before.own_cpu_s == 1
    assert after.monotonic_s - before.monotonic_s == 3.0


def test_this_systems_own_numbers_are_read_as_they_are_meant() -> None:
    """The same fields of the real /proc, beside what the system says of this process by another way."""
    low = os.times()
    read = state._cpu_seconds(os.getpid())
    high = os.times()
    tick = 1.5 / os.sysconf("SC_CLK_TCK")
    assert sum(low[:4]) - 4 * tick <= read <= sum(high[:4]) + 4 * tick


START = MachineState(
    0.0, load_1m=1.0, cpus=2, host_cpus=2, own_cpu_s=5.0, machine_cpu_s=100.0, steal_s=0.0, throttled_s=0.0
)
GPU = GpuState(0, sm_clock_mhz=1800, foreign_processes=0, throttle_reasons=("power cap",))


def after(**changes: Any) -> MachineState:
    """Ten seconds later, all work our own."""
    return replace(START, **({"monotonic_s": 10.0, "own_cpu_s": 20.0, "machine_cpu_s": 115.0} | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"machine_cpu_s": 126.0}, "other programs used 55% of the cores while measuring (at most 50%)"),
        ({"steal_s": 6.0}, "the hypervisor took 30% of the cores away"),
        ({"throttled_s": 8.0}, "the CPU quota held us back 40% of the time"),
        (
            {"gpus": (replace(GPU, throttle_reasons=("hardware thermal slowdown",)),)},
            "GPU 0 was throttled during or after measuring: hardware",
        ),
        ({"gpus": (replace(GPU, throttle_reasons=("hardware power brake",)),)}, "hardware power brake"),
        (
            {"gpus": (replace(GPU, foreign_processes=2),)},
            "GPU 0 was shared with 2 other process(es) during or after measuring",
        ),
        ({"gpus": ()}, "GPU 0 was lost while measuring"),
        ({"gpus": (GPU, replace(GPU, index=7))}, "GPU 7 came while measuring"),
    ],
)
def test_unfit(changes: dict[str, Any], reason: str) -> None:
    reasons = state.unfit(replace(START, gpus=(GPU,)), after(**({"gpus": (GPU,)} | changes)))
    assert len(reasons) == 1
    assert reason in reasons[0]


def test_fit() -> None:
    """Our own load, a GPU at its power cap and moderate load of others are how machines are."""
    assert state.unfit(replace(START, gpus=(GPU,)), after(gpus=(GPU,), machine_cpu_s=120.0)) == []
    assert state.unfit(None, None) == []


def test_inside_a_cpu_set_the_hosts_load_says_nothing() -> None:
    inside = replace(START, host_cpus=64)
    assert state.unfit(inside, after(host_cpus=64, machine_cpu_s=700.0)) == []


def test_shared_before_measuring_is_unfit_even_when_gone_after() -> None:
    busy = replace(START, gpus=(replace(GPU, foreign_processes=1),))
    assert "before measuring" in state.unfit(busy, after(gpus=(GPU,)))[0]


def test_differences_of_versions() -> None:
    assert identity.differences(
        {"torch": "2.12", "python": "3.11"}, {"torch": "2.13", "python": "3.11", "triton": "3"}
    ) == [
        "torch 2.12 -> 2.13",
        "triton absent -> 3",
    ]


# -- the GPUs in use -----------------------------------------------------------------------------------------

EIGHT = [f"GPU-{index}" for index in range(8)]


def hashed(*uuids: str) -> list[str]:
    return sorted(hashlib.sha256(uuid.encode()).hexdigest()[:8] for uuid in uuids)


@pytest.mark.parametrize(
    ("devices", "visible", "uuids"),
    [
        (None, None, EIGHT),
        (("cuda:3", "cuda:3", "cpu"), None, ["GPU-3"]),
        (("cuda", "cuda:1"), "6,GPU-2", ["GPU-6", "GPU-2"]),
        (None, "6,GPU-2", ["GPU-6", "GPU-2"]),
        (None, "5,9,1", ["GPU-5"]),
        (None, "", []),
        (None, "-1", []),
        (("cpu", "cpu:1"), None, []),
    ],
)
def test_the_key_and_the_state_are_those_of_the_gpus_in_use(
    devices: tuple[str, ...] | None,
    visible: str | None,
    uuids: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = identity.identify(devices, nvml=Nvml(EIGHT))
    assert sorted(uuid for _, uuid in found.gpus) == hashed(*uuids)
    stranger = os.getppid()
    busy = {index: [stranger] if uuid in uuids else [] for index, uuid in enumerate(EIGHT)}
    gpus = state.read_state(devices, nvml=Nvml(EIGHT, pids=busy)).gpus
    assert [gpu.foreign_processes for gpu in gpus] == [1] * len(uuids)


@pytest.mark.fault
def test_a_job_on_another_gpu_does_not_make_ours_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml = Nvml(EIGHT, pids={index: [os.getppid()] if index == 7 else [] for index in range(8)})
    for device, reasons in (("cuda:0", 0), ("cuda:7", 2)):
        states = [state.read_state((device,), nvml=nvml) for _ in range(2)]
        assert len([line for line in state.unfit(*states) if "was shared" in line]) == reasons


@pytest.mark.fault
def test_a_lost_gpu_in_use_is_one_line_and_another_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml = Nvml(EIGHT[:2])
    before = state.read_state(nvml=nvml)
    nvml.lost.add(1)
    for devices in (None, ("cuda:0", "cuda:1")):
        with pytest.raises(UserError, match=r"gpu 1: .*lost") as caught:
            identity.identify(devices, nvml=nvml)
        assert "\n" not in str(caught.value)
    assert [uuid for _, uuid in identity.identify(("cuda:0",), nvml=nvml).gpus] == hashed("GPU-0")
    assert "GPU 1 was lost while measuring" in state.unfit(before, state.read_state(nvml=nvml))
    watch = GpuWatch(("cuda:1",), read=None)
    monkeypatch.setattr(state, "read_gpus", lambda tree, devices: [] if devices == ("cuda:1",) else [1])
    watch.look()
    assert watch.seen == []


def test_unlike_gpus_are_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA counts the fastest first, NVML by bus: which one `0` is, CUDA alone knows."""
    nvml = Nvml(EIGHT[:2])
    nvml.names = [b"Small", b"Large"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        identity.identify(nvml=nvml)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    keys = set()
    for visible in ("0", "1", "0,1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        keys.add(identity.identify(nvml=nvml).key)
    assert len(keys) == 3


# -- between two segments ------------------------------------------------------------------------------------


def loaded(**changes: Any) -> GpuState:
    return replace(GpuState(0, foreign_processes=0), **changes)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (
            loaded(throttle_reasons=("hardware thermal slowdown",)),
            "throttled during or after measuring: hardware thermal slowdown",
        ),
        (loaded(foreign_processes=2), "shared with 2 other process(es) during or after measuring"),
    ],
)
def test_what_comes_and_goes_under_load_is_unfit(seen: GpuState, reason: str) -> None:
    """Afterwards the GPU is idle: reasons are gone, and so is the stranger."""
    before, then = replace(START, gpus=(loaded(),)), after(gpus=(loaded(throttle_reasons=("idle",)),))
    assert state.unfit(before, state.with_seen(then, [loaded()])) == []
    (found,) = state.unfit(before, state.with_seen(then, [loaded(), seen, loaded()]))
    assert reason in found
    assert state.with_seen(then, [loaded(index=7)]) == then


def test_gpus_are_looked_at_now_and_then_and_without_one_once() -> None:
    now, looks, gpus = [0.0], list[float](), False

    def read() -> list[GpuState]:
        looks.append(now[0])
        return [loaded()] if gpus else []

    for gpus, wanted in ((True, [0.0, 10.0, 20.0]), (False, [0.0])):
        looks.clear()
        watch = GpuWatch(read=read, clock=lambda: now[0])
        for step in range(50):
            now[0] = 0.5 * step
            watch.look()
        assert looks == wanted
        assert len(watch.seen) == (len(wanted) if gpus else 0)


@pytest.mark.fault
def test_a_run_that_was_throttled_in_its_middle_is_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    hot = loaded(throttle_reasons=("hardware slowdown",))
    monkeypatch.setattr(
        "steptime.measure.run.GpuWatch.look", lambda self, *, now=False: self.seen.append(hot)
    )
    monkeypatch.setattr(state, "read_state", lambda devices: replace(START, gpus=(loaded(),)))
    subject = SpinPairs({"a": Cost()}, noise=Noise(step=0.001, slow=0.0))
    quiet = Reporter(quiet=True)
    run = measure(subject, Asked(("a",), 1.0, 5.0), quiet, flushes=0, clock=subject.clock_s)
    found = state.unfit(run.before, run.after)
    assert found == ["GPU 0 was throttled during or after measuring: hardware slowdown"]
