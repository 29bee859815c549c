"""The ways of counting, one file each; `way` says what they have in common."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from steptime.syncs.scopes import leave_out

if TYPE_CHECKING:
    from bench.syncs.ways.way import Way

leave_out(os.path.dirname(__file__))


def make_ways(device: str = "cpu") -> list[Way]:
    """Every way of counting, new and not armed; `device` is where the modes count."""
    from bench.syncs.ways.allocator import AllocatorWay
    from bench.syncs.ways.copies import CopiesWay
    from bench.syncs.ways.cupti import CuptiWay
    from bench.syncs.ways.fake_device import FakeDeviceWay
    from bench.syncs.ways.gpu_trace import GpuTraceWay
    from bench.syncs.ways.lint import LintWay
    from bench.syncs.ways.modes import ModesWay

    return [
        ModesWay(device),
        FakeDeviceWay(),
        LintWay(),
        GpuTraceWay(),
        CopiesWay(),
        AllocatorWay(),
        CuptiWay(),
    ]
