"""What machine is this, and is it fit to measure? NVML and /proc only: no CUDA context is created.

The key is made of what does not change between boots: the GPUs' models and UUIDs (hashed), their number, the CPU's model and
the cores that this process may use. Two GPUs of one model differ by 8% on average (Sinha et al., SC22), so a model name is not a
key. Versions of driver, CUDA, torch and Python are recorded beside it and shown when they differ.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import math
import os
import platform
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from bench.records.types import GpuState, Machine, MachineState

PROC: Final = Path("/proc")
CGROUP: Final = Path("/sys/fs/cgroup")
PACKAGES: Final = ("torch", "transformers", "flash-linear-attention", "triton", "numpy")

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
UNFIT_REASONS: Final = frozenset(
    {"hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "hardware power brake"}
)
"""A power cap is how a loaded GPU normally runs; these are not."""
FOREIGN_SHARE: Final = 0.5
"""Share of the cores that other programs may use while we measure; pairing cancels less than that."""
STEAL_SHARE: Final = 0.2
THROTTLED_SHARE: Final = 0.25


def identify(nvml: ModuleType | Any | None = None) -> Machine:
    """The machine with its key and versions. `nvml`: a stand-in for pynvml, for tests."""
    versions = {"python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    gpus: list[tuple[str, str]] = []
    with _nvml(nvml) as api:
        if api is not None:
            for handle in _handles(api):
                uuid = _text(api.nvmlDeviceGetUUID(handle))
                gpus.append((_text(api.nvmlDeviceGetName(handle)), hashlib.sha256(uuid.encode()).hexdigest()[:8]))
            with contextlib.suppress(Exception):
                versions["driver"] = _text(api.nvmlSystemGetDriverVersion())
            with contextlib.suppress(Exception):
                version = int(api.nvmlSystemGetCudaDriverVersion_v2())
                versions["cuda driver"] = f"{version // 1000}.{version % 1000 // 10}"
    return describe(gpus, cpu_model(), usable_cpus(), versions)


def describe(gpus: Iterable[tuple[str, str]], cpu: str, cpus: int, versions: dict[str, str]) -> Machine:
    """Pure: the machine with its key, a readable name and eight hex digits over all that the key depends on.

    `gpus`: (model, UUID hash) in any order. Versions do not reach the key.
    """
    ordered = tuple(sorted(gpus))
    facts = "\n".join([*(f"{model} {uuid}" for model, uuid in ordered), cpu, str(cpus)])
    digest = hashlib.sha256(facts.encode()).hexdigest()[:8]
    models = sorted({model for model, _ in ordered})
    name = f"{len(ordered)}x-{'-'.join(models)}" if ordered else f"cpu-{cpu}-{cpus}"
    return Machine(f"{_slug(name)}-{digest}", cpu, cpus, ordered, dict(versions))


def _slug(text: str) -> str:
    text = re.sub(r"\b(nvidia|corporation|processor|cpu @.*|\(r\)|\(tm\))", " ", text.lower())
    return re.sub(r"[^a-z0-9.]+", "-", text).strip("-")[:60].strip("-")


def differences(recorded: dict[str, str], now: dict[str, str]) -> list[str]:
    """`torch 2.12.0 -> 2.13.0` for each version that is not what it was."""
    return [
        f"{name} {recorded.get(name, 'absent')} -> {now.get(name, 'absent')}"
        for name in sorted({*recorded, *now})
        if recorded.get(name) != now.get(name)
    ]


@functools.cache
def cpu_model() -> str:
    """Model name of the CPU, or the architecture where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in (PROC / "cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith(("model name", "hardware", "cpu model")):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine() or "unknown"


def usable_cpus() -> int:
    """Cores that this process may use: affinity and the control group's quota, rounded up."""
    count = os.cpu_count() or 1
    with contextlib.suppress(AttributeError, OSError):
        count = len(os.sched_getaffinity(os.getpid()))
    quota = cpu_quota()
    return max(1, min(count, math.ceil(quota))) if quota else count


def cpu_quota(root: Path = CGROUP) -> float | None:
    """CPU quota of the control group in cores (version 2, else 1); None without one."""
    with contextlib.suppress(OSError, ValueError):
        most, period = (root / "cpu.max").read_text().split()
        return None if most == "max" else int(most) / int(period)
    with contextlib.suppress(OSError, ValueError):
        most_us = int((root / "cpu/cpu.cfs_quota_us").read_text())
        return most_us / int((root / "cpu/cpu.cfs_period_us").read_text()) if most_us > 0 else None
    return None


def throttled_seconds(root: Path = CGROUP) -> float | None:
    """Seconds that the control group was held back by its quota; None where there is no such count."""
    for path, key, unit in (("cpu.stat", "throttled_usec", 1e-6), ("cpu/cpu.stat", "throttled_time", 1e-9)):
        with contextlib.suppress(OSError):
            for line in (root / path).read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == key:
                    return int(value) * unit
    return None


def read_state(nvml: ModuleType | Any | None = None) -> MachineState:
    """What may change from minute to minute. Costs a few ms: at the ends of a run only."""
    tree = process_tree()
    busy, steal = _machine_cpu_seconds()
    load = None
    with contextlib.suppress(OSError, AttributeError):
        load = os.getloadavg()[0]
    return MachineState(
        monotonic_s=time.monotonic(),
        load_1m=load,
        cpus=usable_cpus(),
        host_cpus=os.cpu_count() or 1,
        own_cpu_s=sum(_cpu_seconds(pid) for pid in tree),
        machine_cpu_s=busy,
        steal_s=steal,
        throttled_s=throttled_seconds(),
        cpu_mhz=_cpu_mhz(),
        gpus=tuple(read_gpus(tree, nvml)),
    )


def process_tree(root: int | None = None) -> frozenset[int]:
    """This process and all that descend from it."""
    root = os.getpid() if root is None else root
    children: dict[int, list[int]] = {}
    for path in _listing(PROC):
        if path.name.isdigit():
            fields = _stat_fields(int(path.name))
            if fields:
                children.setdefault(int(fields[1]), []).append(int(path.name))
    found, queue = {root}, [root]
    while queue:
        for child in children.get(queue.pop(), ()):
            if child not in found:
                found.add(child)
                queue.append(child)
    return frozenset(found)


def _stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the command's name (which may hold spaces); empty when it is gone."""
    with contextlib.suppress(OSError):
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def _cpu_seconds(pid: int) -> float:
    """User and system seconds of a process and its ended children."""
    fields = _stat_fields(pid)
    return sum(int(value) for value in fields[11:15]) / os.sysconf("SC_CLK_TCK") if len(fields) > 14 else 0.0


def _machine_cpu_seconds() -> tuple[float | None, float | None]:
    with contextlib.suppress(OSError, ValueError, IndexError):
        user, nice, system, _idle, _wait, irq, softirq, steal = (
            int(value) / os.sysconf("SC_CLK_TCK") for value in (PROC / "stat").read_text().splitlines()[0].split()[1:9]
        )
        return user + nice + system + irq + softirq, steal
    return None, None


def _cpu_mhz() -> float | None:
    with contextlib.suppress(OSError, ValueError):
        text = (PROC / "cpuinfo").read_text(errors="replace")
        found = [float(value) for value in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", text, re.MULTILINE)]
        return sum(found) / len(found) if found else None
    return None


def read_gpus(tree: frozenset[int], nvml: ModuleType | Any | None = None) -> list[GpuState]:
    """State of every GPU; a value that NVML does not give is None."""
    found = []
    with _nvml(nvml) as api:
        if api is None:
            return []
        for index, handle in enumerate(_handles(api)):
            found.append(
                GpuState(
                    index=index,
                    sm_clock_mhz=_try(api.nvmlDeviceGetClockInfo, handle, api.NVML_CLOCK_SM),
                    max_sm_clock_mhz=_try(api.nvmlDeviceGetMaxClockInfo, handle, api.NVML_CLOCK_SM),
                    temperature_c=_try(api.nvmlDeviceGetTemperature, handle, api.NVML_TEMPERATURE_GPU),
                    power_w=_watts(_try(api.nvmlDeviceGetPowerUsage, handle)),
                    power_limit_w=_watts(_try(api.nvmlDeviceGetEnforcedPowerLimit, handle)),
                    throttle_reasons=_reasons(api, handle),
                    foreign_processes=_foreign(api, handle, tree),
                )
            )
    return found


def _reasons(api: Any, handle: Any) -> tuple[str, ...]:
    read = getattr(api, "nvmlDeviceGetCurrentClocksEventReasons", None) or api.nvmlDeviceGetCurrentClocksThrottleReasons
    mask = _try(read, handle)
    return () if mask is None else tuple(name for bit, name in REASONS.items() if mask & bit)


def _foreign(api: Any, handle: Any, tree: frozenset[int]) -> int | None:
    running = _try(api.nvmlDeviceGetComputeRunningProcesses, handle)
    if running is None:
        return None
    pids = {process.pid for process in running}
    others = pids - tree
    if others and not pids & tree and not any((PROC / str(pid)).exists() for pid in others):
        # A PID namespace: NVML tells the host's ids, which name nothing here. Ours are as many as have CUDA's memory device open.
        return max(0, len(others) - sum(_uses_cuda(pid) for pid in tree))
    return len(others)


def _uses_cuda(pid: int) -> bool:
    for link in _listing(PROC / str(pid) / "fd"):
        with contextlib.suppress(OSError):
            if os.readlink(link) == "/dev/nvidia-uvm":
                return True
    return False


def _listing(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(folder.iterdir())
    return []


def with_seen(after: MachineState, seen: Iterable[GpuState]) -> MachineState:
    """The state after a run with the worst that was seen of each GPU during it: reasons joined, most strangers. Pure."""
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
                reasons.append(f"GPU {gpu.index} was shared with {gpu.foreign_processes} other process(es) {when} measuring")
    if before is None or after is None:
        return reasons
    if len(before.gpus) != len(after.gpus):
        reasons.append(f"the number of GPUs changed while measuring, {len(before.gpus)} to {len(after.gpus)}")
    for share, most, what in (
        (foreign_share(before, after), FOREIGN_SHARE, "other programs used {:.0%} of the cores"),
        (_share(before.steal_s, after.steal_s, before, after), STEAL_SHARE, "the hypervisor took {:.0%} of the cores away"),
        (
            _share(before.throttled_s, after.throttled_s, before, after),
            THROTTLED_SHARE,
            "the CPU quota held us back {:.0%} of the time",
        ),
    ):
        if share is not None and share > most:
            reasons.append(f"{what.format(share)} while measuring (at most {most:.0%})")
    return reasons


def remarks(before: MachineState | None, after: MachineState | None) -> list[str]:
    """What a reader should know though it does not spoil the run: other load, power cap, clocks. Pure."""
    notes = []
    if before is not None and after is not None:
        share = foreign_share(before, after)
        if share is not None and share > 0.05:
            notes.append(f"other programs used {share:.0%} of the cores while measuring")
        for one, other in zip(before.gpus, after.gpus, strict=False):
            if "power cap" in (*one.throttle_reasons, *other.throttle_reasons):
                notes.append(f"GPU {one.index} ran at its power cap")
            if one.sm_clock_mhz and other.sm_clock_mhz:
                notes.append(f"GPU {one.index} SM clock {one.sm_clock_mhz} -> {other.sm_clock_mhz} MHz")
    return notes


def foreign_share(before: MachineState, after: MachineState) -> float | None:
    """Share of the cores that others used in between; None where it cannot be told.

    /proc/stat counts the whole host: inside a quota or a CPU set smaller than the host it says nothing of our share.
    """
    if before.machine_cpu_s is None or after.machine_cpu_s is None or before.cpus != before.host_cpus:
        return None
    others = (after.machine_cpu_s - before.machine_cpu_s) - (after.own_cpu_s - before.own_cpu_s)
    return _share(0.0, max(0.0, others), before, after)


def _share(first: float | None, last: float | None, before: MachineState, after: MachineState) -> float | None:
    elapsed = after.monotonic_s - before.monotonic_s
    return None if first is None or last is None or elapsed <= 0 else (last - first) / (elapsed * before.cpus)


@contextlib.contextmanager
def _nvml(stand_in: ModuleType | Any | None) -> Iterator[Any | None]:
    """NVML ready to be asked, or None where there is none."""
    api: Any = stand_in
    if api is None:
        try:
            api = importlib.import_module("pynvml")
        except ImportError:
            yield None
            return
    try:
        api.nvmlInit()
    except Exception:
        yield None
        return
    try:
        yield api
    finally:
        with contextlib.suppress(Exception):
            api.nvmlShutdown()


def _handles(api: Any) -> list[Any]:
    return [api.nvmlDeviceGetHandleByIndex(index) for index in range(api.nvmlDeviceGetCount())]


def _try(read: Any, *arguments: Any) -> Any:
    with contextlib.suppress(Exception):
        return read(*arguments)
    return None


def _watts(milliwatts: float | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000.0


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
