"""Stored figures for tests."""

from __future__ import annotations

from pathlib import Path

from dflash.config import Config
from steptime.baselines import recording
from steptime.baselines.store import Baseline, Session
from steptime.machine import identity
from steptime.records.types import ConfigRef, Machine, Throughput

ROOT = Path(__file__).parents[3]
STATED = ROOT / "baselines/pro6000x8/qwen3.6-27b.json"
REFERENCE = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
HERE = identity.describe([("NVIDIA H200", "aaaa")], "AMD EPYC", 16, {"python": "3.11.7", "torch": "2.13.0"})
CONFIG = ConfigRef("cpu-tiny", "0123456789abcdef")


def reference(config: Config) -> ConfigRef:
    return ConfigRef(config.name, config.digest())


def sessions(*values: float) -> list[Session]:
    return [Session(value, "2026-11-29", {"off": value, "all": 0.99 * value}) for value in values]


def measured(*values: float, where: Machine = HERE) -> Baseline:
    return recording.build(
        where, CONFIG, sessions(*(values or (1000.0, 1010.0, 990.0, 1005.0))), "0" * 40, date="2026-11-29"
    )


def now(value: float, spread: float = 0.001) -> Throughput:
    return Throughput(value, value * (1 - spread), value * (1 + spread))


def reference_machine(count: int = 8) -> Machine:
    return identity.describe([(REFERENCE, f"{i:04d}") for i in range(count)], "AMD EPYC", 96, {})
