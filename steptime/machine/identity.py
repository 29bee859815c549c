"""What machine is this? No CUDA context is created to tell.

The key is made of what does not change between boots: models and UUIDs (hashed) of the GPUs in use, their
number, the CPU's model and the cores that this process may use. Two GPUs of one model differ by 8% on average
(Sinha et al., SC22), so a model name is not a key. Versions of driver, CUDA, torch and Python are recorded
beside it and shown when they differ."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import math
import platform
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import psutil

from steptime.errors import UserError
from steptime.nvml import as_text, in_use, opened
from steptime.records.types import Machine

CGROUP: Final = Path("/sys/fs/cgroup")
PACKAGES: Final = ("torch", "transformers", "flash-linear-attention", "triton", "numpy")


def identify(devices: Sequence[str] | None = None, *, nvml: ModuleType | Any | None = None) -> Machine:
    """The machine with its key and versions.

    Args:
        devices: those in use, such as `cuda:1`; other GPUs of the box are no part of it. None: all that
            `CUDA_VISIBLE_DEVICES` leaves.
        nvml: a stand-in for pynvml, for tests.

    Raises:
        UserError: a GPU in use cannot be named: it is lost, or NVML cannot tell which one it is.
    """
    versions = {"python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    gpus: list[tuple[str, str]] = []
    with opened(nvml) as api:
        if api is not None:
            gpus = _named(api, devices)
            with contextlib.suppress(Exception):
                versions["driver"] = as_text(api.nvmlSystemGetDriverVersion())
            with contextlib.suppress(Exception):
                version = int(api.nvmlSystemGetCudaDriverVersion_v2())
                versions["cuda driver"] = f"{version // 1000}.{version % 1000 // 10}"
    return describe(gpus, cpu_model(), usable_cpus(), versions)


def _named(api: Any, devices: Sequence[str] | None) -> list[tuple[str, str]]:
    """Model and hashed UUID of each GPU in use."""
    gpus, problems = in_use(api, devices)
    named = []
    for gpu in gpus:
        try:
            uuid = as_text(api.nvmlDeviceGetUUID(gpu.handle))
            named.append(
                (as_text(api.nvmlDeviceGetName(gpu.handle)), hashlib.sha256(uuid.encode()).hexdigest()[:8])
            )
        except Exception as error:
            problems.append(f"gpu {gpu.index}: not reached: {error}")
    if problems:
        raise UserError(
            f"what this machine is cannot be told: {'; '.join(problems)} (a lost GPU needs a reset; "
            "CUDA_VISIBLE_DEVICES leaves one out)"
        )
    return named


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
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith(("model name", "hardware", "cpu model")):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine() or "unknown"


def usable_cpus() -> int:
    """Cores that this process may use: affinity and the control group's quota, rounded up."""
    count = psutil.cpu_count() or 1
    with contextlib.suppress(AttributeError, psutil.Error):
        count = len(psutil.Process().cpu_affinity() or ()) or count
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
