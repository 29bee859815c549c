"""Stage: NVML as we read it, beside nvidia-smi."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping

from bench.gpu_check.stage import Found, Table, rows_of
from steptime.child_process import ROOT, Ended, run

LIMIT_S = 8.0
FIELDS = ("uuid", "name", "driver_version", "memory.used", "temperature.gpu", "power.draw", "clocks.sm")
NEAR: Mapping[str, tuple[float, float]] = {
    "memory.used": (512.0, 0.05),
    "temperature.gpu": (6.0, 0.0),
    "power.draw": (40.0, 0.5),
    "clocks.sm": (150.0, 0.5),
}
"""How far two readings some tenths of a second apart may be: so many MiB, C, W or MHz, plus a share. Power
and clocks move at once; a wrong unit or GPU would be far beyond."""


class NvmlStage:
    """Every GPU in use, by UUID."""

    name = "nvml"
    asks = "Does NVML give the values that nvidia-smi shows, for the GPUs that CUDA means?"
    seconds = 10

    def look(self) -> Found:
        words = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
        ours, problems = ours_by_uuid()
        try:
            ended = run(words, limit_s=LIMIT_S, folder=ROOT)
        except OSError as error:
            return Found(0, "values", (*problems, f"nvidia-smi cannot be run: {error.strerror}"))
        return read(ours, ended, problems)


def ours_by_uuid() -> tuple[dict[str, dict[str, str]], list[str]]:
    """What NVML says of the GPUs in use, in nvidia-smi's fields and units; and which are not reached."""
    import torch

    from dflash.observe.nvml import READINGS
    from steptime.nvml import as_text, cuda_uuid, in_use, opened

    found: dict[str, dict[str, str]] = {}
    with opened() as api:
        if api is None:
            return {}, ["no NVML here"]
        devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        gpus, problems = in_use(api, devices)
        for gpu in gpus:
            values: dict[str, float] = {}
            for name in ("memory", "temperature", "power"):
                try:
                    values |= READINGS[name](gpu.handle)
                except Exception as error:
                    problems.append(f"gpu {gpu.index}: no {name}: {error}")
            uuid = as_text(api.nvmlDeviceGetUUID(gpu.handle))
            # Of a MIG instance CUDA may tell the parent's UUID.
            if not uuid.startswith("MIG-") and uuid != (known := cuda_uuid(gpu.index)):
                problems.append(f"gpu {gpu.index}: NVML's {uuid} is CUDA's {known}")
            used_gb = values.get("mem_used_gb", values.get("mem_used_with_reserve_gb"))
            found[uuid] = {
                "uuid": uuid,
                "name": as_text(api.nvmlDeviceGetName(gpu.handle)),
                "driver_version": as_text(api.nvmlSystemGetDriverVersion()),
                "memory.used": "" if used_gb is None else str(used_gb * 1e9 / 2**20),
                "temperature.gpu": str(values.get("temp_c", "")),
                "power.draw": str(values.get("power_w", "")),
                "clocks.sm": str(api.nvmlDeviceGetClockInfo(gpu.handle, api.NVML_CLOCK_SM)),
            }
    return found, problems


def read(ours: Mapping[str, Mapping[str, str]], ended: Ended, problems: list[str]) -> Found:
    """Both beside each other. Pure. A value that nvidia-smi shows and we lack is a problem; one that it does
    not support is none."""
    problems = list(problems)
    if ended.code != 0:
        problems.append(f"nvidia-smi: exit code {ended.code}: {ended.last_line}")
    lines = csv.reader(io.StringIO(ended.out), skipinitialspace=True)
    theirs = {line[0]: dict(zip(FIELDS, line, strict=True)) for line in lines if len(line) == len(FIELDS)}
    rows, compared = [], 0
    for uuid, own in ours.items():
        if uuid not in theirs:
            problems.append(f"nvidia-smi does not show {uuid}")
            continue
        for field in FIELDS[1:]:
            other = theirs[uuid][field]
            rows.append((uuid[:12], field, own[field], other))
            if other.startswith("["):  # [N/A], [Not Supported]
                continue
            compared += 1
            if not _agree(field, own[field], other):
                problems.append(f"{uuid[:12]}: {field}: NVML {own[field] or 'nothing'}, nvidia-smi {other}")
    table = Table("Values", ("GPU", "field", "NVML", "nvidia-smi"), rows_of(*rows))
    return Found(compared, "values", tuple(problems), (), (table,))


def _agree(field: str, own: str, other: str) -> bool:
    if field not in NEAR:
        return own == other
    try:
        one, two = float(own), float(other)
    except ValueError:
        return False
    within, share = NEAR[field]
    return abs(one - two) <= within + share * max(abs(one), abs(two))
