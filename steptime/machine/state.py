"""Is the machine fit to measure? What may change from minute to minute, read at both ends of a run, and
judged.

psutil, NVML and the control group's files: no CUDA context is created.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import psutil

from steptime.machine.identity import CGROUP, usable_cpus
from steptime.nvml import ask, in_use, opened
from steptime.records.types import GpuState, MachineState

REASONS: Final = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
}
"""Bits of NVML's clock event reasons."""
BUSY: Final = ("user", "nice", "system", "irq", "softirq")
"""Kinds of CPU time that are work, on the systems that tell them."""
UNFIT_REASONS: Final = frozenset(
    {"hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "hardware power brake"}
)
"""A power cap is how a loaded GPU normally runs; these are not."""
FOREIGN_SHARE: Final = 0.5
"""Share of the cores that other programs may use while we measure; pairing cancels less than that."""
STEAL_SHARE: Final = 0.2
THROTTLED_SHARE: Final = 0.25


def throttled_seconds(root: Path = CGROUP) -> float | None:
    """Seconds that the control group was held back by its quota; None where there is no such count."""
    for path, key, unit in (("cpu.stat", "throttled_usec", 1e-6), ("cpu/cpu.stat", "throttled_time", 1e-9)):
        with contextlib.suppress(OSError):
            for line in (root / path).read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == key:
                    return int(value) * unit
    return None


def read_state(devices: Sequence[str] | None = None, *, nvml: ModuleType | Any | None = None) -> MachineState:
    """What may change from minute to minute. Costs a few ms: at the ends of a run only.

    Args:
        devices: those in use, such as `cuda:1`; None: every visible GPU.
    """
    tree = process_tree()
    # A system that does not tell interrupts or steal lacks the field.
    machine = psutil.cpu_times()._asdict()
    frequency = None
    with contextlib.suppress(NotImplementedError, OSError):
        frequency = psutil.cpu_freq()
    return MachineState(
        monotonic_s=time.monotonic(),
        load_1m=psutil.getloadavg()[0],
        cpus=usable_cpus(),
        host_cpus=psutil.cpu_count() or 1,
        own_cpu_s=sum(_cpu_seconds(pid) for pid in tree),
        machine_cpu_s=sum(machine.get(kind, 0.0) for kind in BUSY),
        steal_s=machine.get("steal"),
        throttled_s=throttled_seconds(),
        cpu_mhz=frequency.current if frequency else None,
        gpus=tuple(read_gpus(tree, devices, nvml=nvml)),
    )


def process_tree() -> frozenset[int]:
    """This process and all that descend from it."""
    return frozenset({os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))})


def _cpu_seconds(pid: int) -> float:
    """User and system seconds of a process and its ended children; 0 when it is gone."""
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return times.user + times.system + times.children_user + times.children_system
    return 0.0


def read_gpus(
    tree: frozenset[int], devices: Sequence[str] | None = None, *, nvml: ModuleType | Any | None = None
) -> list[GpuState]:
    """State of every GPU in use, by CUDA's index; a value that NVML does not give is None, and a GPU that it
    does not reach is missing."""
    found = []
    with opened(nvml) as api:
        if api is None:
            return []
        for gpu in in_use(api, devices)[0]:
            index, handle = gpu.index, gpu.handle
            found.append(
                GpuState(
                    index=index,
                    sm_clock_mhz=ask(api.nvmlDeviceGetClockInfo, handle, api.NVML_CLOCK_SM),
                    max_sm_clock_mhz=ask(api.nvmlDeviceGetMaxClockInfo, handle, api.NVML_CLOCK_SM),
                    temperature_c=ask(api.nvmlDeviceGetTemperature, handle, api.NVML_TEMPERATURE_GPU),
                    power_w=_watts(ask(api.nvmlDeviceGetPowerUsage, handle)),
                    power_limit_w=_watts(ask(api.nvmlDeviceGetEnforcedPowerLimit, handle)),
                    throttle_reasons=_reasons(api, handle),
                    foreign_processes=_foreign(api, handle, tree),
                )
            )
    return found


def _reasons(api: Any, handle: Any) -> tuple[str, ...]:
    read = (
        getattr(api, "nvmlDeviceGetCurrentClocksEventReasons", None)
        or api.nvmlDeviceGetCurrentClocksThrottleReasons
    )
    mask = ask(read, handle)
    return () if mask is None else tuple(name for bit, name in REASONS.items() if mask & bit)


def _foreign(api: Any, handle: Any, tree: frozenset[int]) -> int | None:
    running = ask(api.nvmlDeviceGetComputeRunningProcesses, handle)
    if running is None:
        return None
    pids = {process.pid for process in running}
    others = pids - tree
    if others and not pids & tree and not any(psutil.pid_exists(pid) for pid in others):
        # A PID namespace: NVML tells the host's ids, which name nothing here. Ours are as many as have CUDA's
        # memory device open.
        return max(0, len(others) - sum(_uses_cuda(pid) for pid in tree))
    return len(others)


def _uses_cuda(pid: int) -> bool:
    # By hand: psutil's open files are regular files only.
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(link) == "/dev/nvidia-uvm":
                    return True
    return False


def with_seen(after: MachineState, seen: Iterable[GpuState]) -> MachineState:
    """The state after a run with the worst that was seen of each GPU during it: reasons joined, most foreign
    processes. Pure."""
    worst = {gpu.index: gpu for gpu in after.gpus}
    for gpu in seen:
        if gpu.index in worst:
            one = worst[gpu.index]
            counts = [count for count in (one.foreign_processes, gpu.foreign_processes) if count is not None]
            worst[gpu.index] = replace(
                one,
                throttle_reasons=tuple(dict.fromkeys((*one.throttle_reasons, *gpu.throttle_reasons))),
                foreign_processes=max(counts, default=None),
            )
    return replace(after, gpus=tuple(worst.values()))


def unfit(before: MachineState | None, after: MachineState | None) -> list[str]:
    """Why what was measured between two states cannot be trusted, one line each; empty: fit. Pure."""
    reasons = []
    for when, state in (("before", before), ("during or after", after)):
        for gpu in state.gpus if state else ():
            bad = [name for name in gpu.throttle_reasons if name in UNFIT_REASONS]
            if bad:
                reasons.append(f"GPU {gpu.index} was throttled {when} measuring: {', '.join(bad)}")
            if gpu.foreign_processes:
                reasons.append(
                    f"GPU {gpu.index} was shared with {gpu.foreign_processes} other process(es) {when} "
                    "measuring"
                )
    if before is None or after is None:
        return reasons
    then, now = ({gpu.index for gpu in state.gpus} for state in (before, after))
    reasons += [f"GPU {index} was lost while measuring" for index in sorted(then - now)]
    reasons += [f"GPU {index} came while measuring" for index in sorted(now - then)]
    for share, most, what in (
        (foreign_share(before, after), FOREIGN_SHARE, "other programs used {:.0%} of the cores"),
        (
            steal_share(before, after),
            STEAL_SHARE,
            "the hypervisor took {:.0%} of the cores away",
        ),
        (
            _share(before.throttled_s, after.throttled_s, before, after),
            THROTTLED_SHARE,
            "the CPU quota held us back {:.0%} of the time",
        ),
    ):
        if share is not None and share > most:
            reasons.append(f"{what.format(share)} while measuring (at most {most:.0%})")
    return reasons


def foreign_share(before: MachineState, after: MachineState) -> float | None:
    """Share of the cores that others used in between; None where it cannot be told.

    /proc/stat counts the whole host: inside a quota or a CPU set smaller than the host it says nothing of our
    share."""
    if before.machine_cpu_s is None or after.machine_cpu_s is None or before.cpus != before.host_cpus:
        return None
    others = (after.machine_cpu_s - before.machine_cpu_s) - (after.own_cpu_s - before.own_cpu_s)
    return _share(0.0, max(0.0, others), before, after)


def steal_share(before: MachineState, after: MachineState) -> float | None:
    """Share of the cores that the hypervisor gave to others in between; None where it does not say."""
    return _share(before.steal_s, after.steal_s, before, after)


def _share(
    first: float | None, last: float | None, before: MachineState, after: MachineState
) -> float | None:
    elapsed = after.monotonic_s - before.monotonic_s
    return None if first is None or last is None or elapsed <= 0 else (last - first) / (elapsed * before.cpus)


def _watts(milliwatts: float | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000.0
