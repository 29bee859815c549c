"""gpu: utilisation, memory, power, temperature and throttling of the GPUs in use, through NVML."""

from __future__ import annotations

import os
import threading
from typing import ClassVar

import torch

from dflash.observe import nvml
from dflash.observe.collectors.base import Collector, Sources
from dflash.observe.metric import Metric
from dflash.observe.nvml import GpuReader, pynvml
from dflash.observe.roles import Role
from steptime.nvml import find_handles

_NVML = "NVML, by UUID, in a thread for each GPU"
_UTIL = "share of the last moments (1/6 s to 1 s) in which some kernel ran; not how full the GPU was"
_KEYS = (
    ("util_pct", "%", _UTIL),
    ("mem_used_gb", "GB", "memory in use by all processes, the driver's reserve not counted"),
    (
        "mem_used_with_reserve_gb",
        "GB",
        "memory in use with the driver's reserve; in place of mem_used_gb on old drivers",
    ),
    ("power_w", "W", "power drawn by the board"),
    ("temp_c", "°C", "temperature of the GPU"),
    ("throttle_power", "1", "1 while clocks are held down by the power limit"),
    ("throttle_thermal_sw", "1", "1 while clocks are held down by the driver for heat"),
    ("throttle_thermal_hw", "1", "1 while clocks are held down by the hardware for heat"),
    ("throttle_slowdown_hw", "1", "1 while the hardware slows the clocks by half or more"),
    ("throttle_power_brake_hw", "1", "1 while an external power brake holds clocks down"),
)
_MEANS = ("util_pct", "mem_used_gb", "power_w", "temp_c")
SLOW_S = 2.0


class GpuCollector(Collector):
    """Utilisation, memory, power, temperature and throttling of the GPUs in use; `{i}` is CUDA's index.

    Wakes the GPUs' readers at each tick and reports what they read since the last one.
    """

    name = "gpu"
    layers = ("tick", "flush")
    metrics: ClassVar[tuple[Metric, ...]] = (
        *(
            Metric(
                f"gpu/{role}_mean/{key}", unit, "instant", f"mean over the {role}s' GPUs: {meaning}", _NVML
            )
            for role in ("target", "drafter")
            for key, unit, meaning in _KEYS
            if key in _MEANS
        ),
        *(Metric(f"gpu/{{i}}/{key}", unit, "instant", meaning, _NVML) for key, unit, meaning in _KEYS),
    )

    def __init__(self, sources: Sources) -> None:
        super().__init__(sources)
        self._opener: threading.Thread | None = None
        self._readers: tuple[GpuReader, ...] = ()
        self._error: Exception | None = None

    @classmethod
    def unavailable(cls) -> str:
        return nvml.unavailable() if torch.cuda.is_available() else "no GPU"

    def throw(self, on: bool) -> None:
        if on and self._opener is None and self.sources.roles.cuda_indexes():
            self._opener = threading.Thread(target=self._open, name="nvml-open", daemon=True)
            self._opener.start()

    def sample(self, now_ns: int) -> dict[str, float]:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        readings = {reader.index: reader.take() for reader in self._readers}
        values = {
            f"gpu/{index}/{key}": value for index, one in readings.items() for key, value in one.items()
        }
        roles: tuple[Role, ...] = ("target", "drafter")
        for role in roles:
            indexes = self.sources.roles.cuda_indexes(role)
            for key in _MEANS:
                known = [readings[index][key] for index in indexes if key in readings.get(index, {})]
                if known:
                    values[f"gpu/{role}_mean/{key}"] = sum(known) / len(known)
        return values

    def idle(self) -> bool:
        opening = self._opener is not None and self._opener.is_alive()
        return not opening and all(reader.idle for reader in self._readers)

    def threads_cpu_s(self) -> float:
        return sum(reader.cpu_s for reader in self._readers)

    def close(self) -> None:
        readers, self._readers = self._readers, ()
        ended = [reader.close() for reader in readers]
        # A reader stuck in a call keeps NVML open: shutting it down under a call is not safe.
        if ended and all(ended):
            pynvml.nvmlShutdown()

    def _open(self) -> None:
        """Initialise NVML and find the GPUs, in a thread: on a sick driver this may take long."""
        roles, report = self.sources.roles, self.sources.report
        try:
            pynvml.nvmlInit()
            handles, problems = find_handles(pynvml, roles.cuda_indexes(), dict(roles.gpu_uuids), os.environ)
        except Exception as error:
            self._error = error
            return
        for problem in problems:
            report(problem)
        self._readers = tuple(
            GpuReader(index, handle, report, slow_s=SLOW_S) for index, handle in handles.items()
        )
