"""The ways that know the trainer's parts, among the ways of counting."""

from __future__ import annotations

from bench.syncs.ways.fake_device import FakeDeviceWay
from bench.syncs.ways.lint import LintWay
from steptime.counting.ways.registry import WAYS, make_way, make_ways

__all__ = ["WAYS", "make_way", "make_ways"]

for way in (FakeDeviceWay, LintWay):
    WAYS.entries.setdefault(way.name, way)
