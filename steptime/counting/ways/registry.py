"""Every way of counting. A new one is a file of its own and its line here; a trainer adds its own to
`WAYS`."""

from __future__ import annotations

from typing import Any

from steptime.counting.ways.allocator import AllocatorWay
from steptime.counting.ways.copies import CopiesWay
from steptime.counting.ways.cupti import CuptiWay
from steptime.counting.ways.gpu_trace import GpuTraceWay
from steptime.counting.ways.modes import ModesWay
from steptime.counting.ways.way import Way
from steptime.registry import Registry

WAYS: Registry[Any] = Registry("way", ModesWay, GpuTraceWay, CopiesWay, AllocatorWay, CuptiWay)


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
