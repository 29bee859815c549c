"""The few lines that differ between CUDA, the CPU and simulated devices, so that the pipeline has one code
path.

`Device(name)` makes the right kind: `cpu` and `cpu:N` (every operation is done when it returns: events are
always complete, streams order nothing), `cuda:N`, and `sim:N` (`simulated`: the CPU under CUDA's rules)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from dflash.device.base import Device
from dflash.device.simulated import simulating
from steptime import simulate
from steptime.errors import UserError

__all__ = ["Device", "check_devices", "one_device", "simulating", "torch_dtype"]


def torch_dtype(name: str) -> torch.dtype:
    """`float32` or `bfloat16` as torch's type."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def check_devices(names: Sequence[str]) -> None:
    """Refuse a CUDA device that this machine lacks, a simulated one when no simulation is open, and a mixture
    of kinds: a CPU cannot wait behind a GPU's event, nor a GPU behind the CPU.

    Raises:
        UserError: naming the device and what is there.
    """
    for name in names:
        if name.startswith("sim") and simulate.current() is None:
            raise UserError(
                f"device {name!r}: no simulation is open; use dflash train, or dflash.device.simulating"
            )
        if not name.startswith("cuda"):
            continue
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(name.partition(":")[2] or 0) >= count:
            raise UserError(
                f"device {name!r}: this machine has {count} CUDA devices; try --set "
                "target.devices='[\"cpu\"]'"
            )
    kinds = sorted({name.partition(":")[0] for name in names})
    if len(kinds) > 1:
        raise UserError(f"devices of several kinds in one run, {' and '.join(kinds)}: must be of one kind")


@contextlib.contextmanager
def one_device(name: str) -> Iterator[Device]:
    """A device for a command of one thread, active in it; a simulation is opened for a simulated one.

    Raises:
        UserError: this machine has no such device.
    """
    with simulating((name,)):
        check_devices((name,))
        device = Device(name)
        with device.active():
            yield device
