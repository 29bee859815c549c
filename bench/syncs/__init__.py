"""Counting host syncs and device work: the ways, one file each; the difference; the proof.

with count_syncs() as syncs:       # around any PyTorch loop
    ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.syncs.way import Way


def ways(device: str = "cpu") -> list[Way]:
    """Every way of counting, new and not armed; `device` is where the modes count."""
    from bench.syncs.allocator import AllocatorWay
    from bench.syncs.copies import CopiesWay
    from bench.syncs.cupti import CuptiWay
    from bench.syncs.fake_device import FakeDeviceWay
    from bench.syncs.gpu_trace import GpuTraceWay
    from bench.syncs.lint import LintWay
    from bench.syncs.modes import ModesWay

    return [ModesWay(device), FakeDeviceWay(), LintWay(), GpuTraceWay(), CopiesWay(), AllocatorWay(), CuptiWay()]
