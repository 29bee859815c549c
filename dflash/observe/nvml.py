"""GPUs through NVML: each metric given up separately, each GPU asked by a thread of its own. Which GPU is
which: `steptime.nvml`.

NVML makes no CUDA context, but a call may take seconds on a sick driver: so the monitor never calls it. It
wakes the readers, and takes what they have left since."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter, thread_time
from typing import Any

import pynvml

GIVE_UP_AFTER = 3
THROTTLE_REASONS = {
    "power": "nvmlClocksEventReasonSwPowerCap",
    "thermal_sw": "nvmlClocksEventReasonSwThermalSlowdown",
    "thermal_hw": "nvmlClocksEventReasonHwThermalSlowdown",
    "slowdown_hw": "nvmlClocksEventReasonHwSlowdown",
    "power_brake_hw": "nvmlClocksEventReasonHwPowerBrakeSlowdown",
}


def _util(handle: Any) -> dict[str, float]:
    return {"util_pct": float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)}


def _memory(handle: Any) -> dict[str, float]:
    try:
        return {
            "mem_used_gb": pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used / 1e9
        }
    except (
        pynvml.NVMLError_NotSupported,
        pynvml.NVMLError_FunctionNotFound,
        pynvml.NVMLError_ArgumentVersionMismatch,
    ):
        # The first version counts the driver's reserve as used: another number, so another name.
        return {"mem_used_with_reserve_gb": pynvml.nvmlDeviceGetMemoryInfo(handle).used / 1e9}


def _power(handle: Any) -> dict[str, float]:
    return {"power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3}


def _temperature(handle: Any) -> dict[str, float]:
    return {"temp_c": float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))}


def _throttle(handle: Any) -> dict[str, float]:
    try:
        mask = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except pynvml.NVMLError_FunctionNotFound:  # drivers before 535 know it by its former name
        mask = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return {
        f"throttle_{name}": float(bool(mask & getattr(pynvml, bit))) for name, bit in THROTTLE_REASONS.items()
    }


READINGS: dict[str, Callable[[Any], dict[str, float]]] = {
    "utilisation": _util,
    "memory": _memory,
    "power": _power,
    "temperature": _temperature,
    "throttle reasons": _throttle,
}


def unavailable() -> str:
    """Why there is no NVML on this machine; empty when there is."""
    try:
        pynvml.nvmlInit()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return f"no NVML ({error})"
    return ""


class GpuReader:
    """Reads one GPU when woken, in a thread of its own.

    Args:
        readings: what to read; default all.
        slow_s: a call that takes longer is given up.
    """

    def __init__(
        self,
        index: int,
        handle: Any,
        report: Callable[[str], None],
        *,
        slow_s: float,
        readings: dict[str, Callable[[Any], dict[str, float]]] | None = None,
    ) -> None:
        self.index = index
        self.lost = False
        self.cpu_s = 0.0
        self._handle, self._report, self._slow_s = handle, report, slow_s
        self._readings = dict(READINGS if readings is None else readings)
        self._failures = dict.fromkeys(self._readings, 0)
        self._call: tuple[str, float] | None = None
        self._values: dict[str, float] | None = None
        self._wake = threading.Event()
        self._stop = False
        self._waiting = False
        self._thread = threading.Thread(target=self._run, name=f"nvml-{index}", daemon=True)
        self._thread.start()

    def take(self) -> dict[str, float]:
        """What was read since the last call; wakes the reader for the next. Called by the monitor; never
        waits."""
        values, self._values = self._values, None
        self._judge_call()
        if not self.lost:
            self._wake.set()
        return values or {}

    @property
    def idle(self) -> bool:
        """Whether it has read all that it was woken for."""
        # In this order: the thread says that it no longer waits before it puts the call to wake away.
        return self.lost or (not self._wake.is_set() and self._waiting)

    def close(self) -> bool:
        """End the thread; False when it is stuck in a call."""
        self._stop = True
        self._wake.set()
        self._thread.join(0.5)
        return not self._thread.is_alive()

    def _judge_call(self) -> None:
        call = self._call
        if call is not None and perf_counter() - call[1] > self._slow_s and call[0] in self._readings:
            self._give_up(call[0], f"the call has taken over {self._slow_s:g} s")

    def _give_up(self, reading: str, why: str) -> None:
        if self._readings.pop(reading, None) is not None:
            self._report(f"gpu {self.index}: {reading} is off: {why}")

    def _run(self) -> None:
        while True:
            self._waiting = True
            self._wake.wait()
            self._waiting = False
            self._wake.clear()
            if self._stop or self.lost:
                return
            values: dict[str, float] = {}
            for reading in tuple(self._readings):
                values.update(self._read(reading))
                if self.lost:
                    return
            if values:
                self._values = values
            self.cpu_s = thread_time()

    def _read(self, reading: str) -> dict[str, float]:
        read = self._readings.get(reading)
        if read is None:
            return {}
        started = perf_counter()
        self._call = (reading, started)
        try:
            values = read(self._handle)
        except pynvml.NVMLError_GpuIsLost:
            self.lost = True
            self._report(f"gpu {self.index}: lost: the driver no longer reaches it")
            return {}
        except Exception as error:
            self._failures[reading] += 1
            for_good = isinstance(error, pynvml.NVMLError_NotSupported | pynvml.NVMLError_FunctionNotFound)
            if for_good or self._failures[reading] >= GIVE_UP_AFTER:
                self._give_up(reading, str(error) or type(error).__name__)
            return {}
        finally:
            self._call = None
        took = perf_counter() - started
        if took > self._slow_s:
            self._give_up(reading, f"a call took {took:.1f} s")
            return {}
        self._failures[reading] = 0
        return values
