"""What travels through the harness besides pairs and costs: machines, counts, verdicts.

Frozen dataclasses without behaviour beyond small conversions; every other file in `bench/` speaks these
words. Percentages are slowdowns: the share of the throughput that is lost, positive when slower.
`slowdown_percent` and `log_ratio` convert between a percentage and theta = ln(seconds per token, arm) -
ln(seconds per token, off), exactly in both directions."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Final

from pydantic import ConfigDict

OFF: Final = "off"
ALL: Final = "all"

STRICT: Final = ConfigDict(extra="forbid", allow_inf_nan=False)


def slowdown_percent(theta: float) -> float:
    """Share of the throughput lost, percent: 100 (1 - exp(-theta)). 2% lost is theta = 0.0202."""
    return -100.0 * math.expm1(-theta)


def log_ratio(percent: float) -> float:
    """The theta of a slowdown in percent: -ln(1 - percent/100). Raises ValueError at 100% and over."""
    return -math.log1p(-percent / 100.0)


class Verdict(enum.StrEnum):
    """What the evidence allows to be said; the first three are answers, the others say that there is none."""

    WITHIN = "within"
    """U < budget."""
    OVER = "over"
    """L > budget, or an exact count rose."""
    SLOWER = "slower"
    """L > 0, not resolved against the budget."""
    UNRESOLVED = "unresolved"
    INVALID = "invalid"
    """Losses differ, a counter was not armed, or the machine was unfit."""
    NO_BASELINE = "no-baseline"
    """Nothing to compare with, or an incomplete set of measurements."""


class ExitCode(enum.IntEnum):
    """Exit codes of `python -m bench`."""

    WITHIN = 0
    OVER = 1
    USAGE = 2
    UNRESOLVED = 3
    INVALID = 4
    INCOMPLETE = 5


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU at one moment; None: the value is not available."""

    __pydantic_config__ = STRICT

    index: int
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    foreign_processes: int | None = None
    """Processes on this GPU that are not this one or its children."""


@dataclass(frozen=True, slots=True)
class MachineState:
    """What may change from minute to minute. `machine.unfit(before, after)` judges a pair of them."""

    __pydantic_config__ = STRICT

    monotonic_s: float
    load_1m: float | None = None
    cpus: int = 1
    """Cores this process may use."""
    host_cpus: int = 1
    """Cores that the system counts; more than `cpus` inside a quota or a CPU set."""
    own_cpu_s: float = 0.0
    """CPU seconds of this process and its ended children."""
    machine_cpu_s: float | None = None
    """Busy CPU seconds of all cores since boot."""
    steal_s: float | None = None
    """CPU seconds that the hypervisor gave to others since boot."""
    throttled_s: float | None = None
    """Seconds that the control group was held back by its CPU quota since it was made."""
    cpu_mhz: float | None = None
    gpus: tuple[GpuState, ...] = ()


@dataclass(frozen=True, slots=True)
class Machine:
    """Which machine this is. `key` is made only of what does not change between boots.

    Attributes:
        key: name of the machine's folder under `baselines/`.
        cpu_model, cpus, gpus: what the key is made of; one (model, UUID hash) pair for each GPU.
        versions: driver, CUDA, torch, Python, ...: recorded and shown when they differ, never part of the
            key.
    """

    __pydantic_config__ = STRICT

    key: str
    cpu_model: str
    cpus: int
    gpus: tuple[tuple[str, str], ...] = ()
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CountedPlace:
    """A place in the code and what was counted there."""

    __pydantic_config__ = STRICT

    kind: str
    """sync, declared, operation, copy, allocation, bytes, event, or driver: memory asked of the driver."""
    role: str
    """Scope: target, drafter, prefetcher, monitor, ..."""
    where: str
    """`file:line function`."""
    count: int
    steps: int


@dataclass(frozen=True, slots=True)
class ExactCounts:
    """Integers of one arm over `steps` steps, counted in an untimed process.

    `armed` False: the counter could not be armed, and the numbers mean nothing (the run is invalid, never 0).
    A kind that this machine cannot count (device allocations without a GPU, say) is None.
    """

    __pydantic_config__ = STRICT

    arm: str
    steps: int
    armed: bool
    syncs: int | None = None
    operations: int | None = None
    copies: int | None = None
    allocations: int | None = None
    places: tuple[CountedPlace, ...] = ()
    ways: tuple[str, ...] = ()
    """Ways of counting that were armed."""
    unavailable: tuple[str, ...] = ()
    """Ways that could not be armed, each with its reason."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The code that was measured; `diff_hash` names the uncommitted changes, empty when clean."""

    __pydantic_config__ = STRICT

    id: str
    dirty: bool = False
    diff_hash: str = ""


@dataclass(frozen=True, slots=True)
class ConfigRef:
    """Name and digest of the config."""

    __pydantic_config__ = STRICT

    name: str
    hash: str


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens per second with everything off, with a 90% interval."""

    __pydantic_config__ = STRICT

    tokens_per_second: float
    low: float
    high: float
