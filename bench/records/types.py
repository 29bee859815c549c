"""What travels through the harness: arms and segments in, intervals and costs out.

Frozen dataclasses without behaviour beyond small conversions; every other file in `bench/` speaks these
words. Percentages are slowdowns: the share of the throughput that is lost, positive when slower.
`slowdown_percent` and `log_ratio` convert between a percentage and theta = ln(seconds per token, arm) -
ln(seconds per token, off), exactly in both directions."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from pydantic import ConfigDict

OFF: Final = "off"
ALL: Final = "all"
OFF_AGAIN: Final = "off-again"
ONLY: Final = "only:"
WITHOUT: Final = "without:"

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
    """The A/A arm failed, losses differ, a counter was not armed, or the machine was unfit."""
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
class Arm:
    """One setting of the switches: the collectors that are on."""

    name: str
    collectors: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Segment:
    """Some steps of one arm, timed as one, washout not included.

    Attributes:
        arm: name of the arm.
        round: from 0, inside its process.
        order: place of the segment inside its round, from 0.
        steps: measured steps.
        tokens: real context tokens trained on in those steps.
        seconds: wall time of those steps.
        step_seconds: wall time of each step, `[steps]`; empty when only the whole was timed.
        phase: place in the cycle of the first measured step's batch.
        losses_digest: digest of the cycle's losses, turned so that phase 0 comes first: equal work gives
            equal digests wherever a segment begins. Empty: not recorded.
        process: which process measured it, from 0.
        step_tokens: tokens of each step, `[steps]`, when the subject knows them.
    """

    __pydantic_config__ = STRICT

    arm: str
    round: int
    order: int
    steps: int
    tokens: int
    seconds: float
    step_seconds: tuple[float, ...] = ()
    phase: int = 0
    losses_digest: str = ""
    process: int = 0
    step_tokens: tuple[int, ...] = ()


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
class Measurement:
    """Everything that a run measured, before any judgement.

    Attributes:
        subject: name of what was measured.
        cycle: batches in the replayed cycle.
        arms: every arm that the plan holds; an arm without segments makes the set incomplete.
        collectors: names judged, in table order.
        segments: in the order they were taken.
        rounds: whole rounds planned to exist in each process (a round without all its arms is incomplete).
        accounted_percent: per collector and for "all", the instruments' and monitor's own cost as a share of
            the step.
        counts: exact counts per arm name; empty: not counted.
        stopped: why measuring ended: "clear", "time", "rounds", ...
        faults: what went wrong on the way (a crashed arm, ...), one line each.
    """

    subject: str
    cycle: int
    arms: tuple[Arm, ...]
    collectors: tuple[str, ...]
    segments: tuple[Segment, ...]
    before: MachineState | None = None
    after: MachineState | None = None
    accounted_percent: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, ExactCounts] = field(default_factory=dict)
    losses: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Losses of one cycle for each arm, phase 0 first."""
    washout_steps: int = 0
    warmup_steps: int = 0
    rounds: int = 0
    stopped: str = ""
    seed: int = 0
    pipeline_efficiency: float | None = None
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Interval:
    """A slowdown with its one-sided 95% bounds, percent of the throughput.

    Attributes:
        percent: point estimate.
        low, high: one-sided 95% bounds L and U (together the two-sided 90% interval).
        mde: smallest slowdown that this many units of this spread would find in 95 of 100 runs.
        n: units (rounds, or processes when there are several).
        spread: standard deviation of the contrast over units, percent.
        estimator: "plain" (whole segments), "middle" (the middle half of the rounds) or "step" (paired
            steps); see `estimates`.
        sign_flip_p: one-sided p of the sign-flip test of "no slowdown", the cross-check.
        plain_percent: the plain estimate beside it.
        p_two_sided: p of "no difference at all", either way.
        ceiling_percent: plain estimate of the arms in which others are on too, when the upper bound uses them
            (see `intervals.interval`).
    """

    __pydantic_config__ = STRICT

    percent: float
    low: float
    high: float
    mde: float
    n: int = 0
    spread: float = 0.0
    estimator: str = "plain"
    sign_flip_p: float | None = None
    plain_percent: float | None = None
    p_two_sided: float | None = None
    ceiling_percent: float | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """What one collector, or all together (`name` = "all"), costs. None: not measured or not countable
    here."""

    __pydantic_config__ = STRICT

    name: str
    isolated: Interval | None
    marginal: Interval | None
    accounted_percent: float | None
    syncs_added: int | None
    operations_added: int | None
    copies_added: int | None
    allocations_added: int | None
    verdict: Verdict
    reasons: tuple[str, ...] = ()


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
    """Tokens per second of the `off` arm with a 90% interval."""

    __pydantic_config__ = STRICT

    tokens_per_second: float
    low: float
    high: float
