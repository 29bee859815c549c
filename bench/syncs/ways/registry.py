"""Every way of counting. A new one is a file of its own and its line here."""

from __future__ import annotations

from typing import Any

from bench.syncs.ways.allocator import AllocatorWay
from bench.syncs.ways.copies import CopiesWay
from bench.syncs.ways.cupti import CuptiWay
from bench.syncs.ways.fake_device import FakeDeviceWay
from bench.syncs.ways.gpu_trace import GpuTraceWay
from bench.syncs.ways.lint import LintWay
from bench.syncs.ways.modes import ModesWay
from bench.syncs.ways.way import Way
from steptime.registry import Registry

WAYS: Registry[Any] = Registry(
    "way", ModesWay, FakeDeviceWay, LintWay, GpuTraceWay, CopiesWay, AllocatorWay, CuptiWay
)


def make_ways(device: str = "cpu") -> list[Way]:
    """Every way, new and not armed; `device` is where those count that follow the program's device."""
    return [make_way(name, device) for name in WAYS.names]


def make_way(name: str, device: str = "cpu") -> Way:
    """The way of that name, new and not armed.

    Raises:
        UserError: there is none.
    """
    way: type[Any] = WAYS[name]
    return way(device) if issubclass(way, ModesWay) else way()
