"""What can be measured: kinds of subjects, what a run leaves, and how step boundaries are timed.
`steptime/subjects/pairs.py` has the protocol of a subject."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from steptime.errors import UserError
from steptime.records.types import ExactCounts
from steptime.timeline.picture import Rounds

if TYPE_CHECKING:
    from steptime.subjects.injection import Injection
    from steptime.subjects.pairs import PairSubject

INJECTED = "injected"
"""Name of the collector that `--inject` adds: it does nothing but lose a known share of every step."""


@dataclass(frozen=True, slots=True)
class SubjectResult:
    """What a finished run leaves besides its segments.

    Attributes:
        losses: (step, loss) in any order; steps whose loss was dropped on the way are missing.
        accounted_percent: instruments' and monitor's own cost as a share of the step, per collector and for
            "all".
        stage_tokens_per_second: throughput of the slowest stage alone, None when unknown.
        peak_memory_bytes: peak of the process (or of its GPUs, whichever the subject trains on).
        notes: things to be told in the report, one line each (dropped losses, a collector that switched
            itself off).
        faults: things that make the run invalid, one line each.
        rounds: pictures of the rounds that were asked for; None where nothing was recorded.
    """

    losses: Sequence[tuple[int, float]] = ()
    accounted_percent: Mapping[str, float] | None = None
    stage_tokens_per_second: float | None = None
    peak_memory_bytes: int | None = None
    notes: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    rounds: Rounds | None = None


class Settings(Protocol):
    """The user's settings of a subject. Only the subject looks inside; the rest of the harness names and
    compares them."""

    @property
    def name(self) -> str:
        """Of the config, by which baselines are found."""

    def digest(self) -> str:
        """Equal for settings that train alike."""


@dataclass(frozen=True, slots=True)
class Named:
    """Settings of a subject that has none to choose: only what they are found by."""

    name: str
    digest_: str

    def digest(self) -> str:
        return self.digest_


def refuse_settings(subject: str, config: str | None, changes: Sequence[str]) -> None:
    """For a subject without a config file. Raises UserError."""
    if config is not None or changes:
        given = "--set" if config is None else "--config"
        raise UserError(f"{given}: subject {subject} has no config file; its own code says what it trains")


class Doors(NamedTuple):
    """Modules that `python -m` runs for a subject: the command line, a process of a gate, one that counts."""

    command: str = "steptime"
    gate: str = "steptime.gate_worker"
    counting: str = "steptime.count_worker"


class SubjectKind(Protocol):
    """What can be asked for with `--subject NAME`: makes subjects, and says what else can be asked about
    them."""

    name: str
    doors: Doors
    root: Path
    """The tree whose code is measured: its commit is the receipt's, its `baselines` are held against."""
    counted: bool
    """Its steps work on a device: a verdict needs exact counts, and a gate compares the first losses of both
    commits."""
    gate_launches: int | None
    """Launches of a gate where building costs next to nothing; None: as many as the gate itself thinks
    fit."""

    def settings(self, config: str | None, changes: Sequence[str]) -> Settings:
        """The settings of `--config FILE` (None: not given) and of each `--set KEY=VALUE`.

        Raises:
            UserError: they are wrong, or the subject has no such settings.
        """

    def devices(self, settings: Any) -> Sequence[str]:
        """Names of the devices that a subject of these settings works on."""

    def make_pairs(
        self,
        settings: Any,
        *,
        injections: Sequence[Injection] = (),
        plant: str = "",
        time_stages: bool = False,
    ) -> PairSubject:
        """A subject that is measured in pairs, not built yet.

        Args:
            injections: known costs, each a switch of its own.
            plant: name of a bad collector to add.
            time_stages: also time each stage alone, before the run.

        Raises:
            UserError: no such plant.
        """

    def counted_as(self, settings: Any) -> Mapping[str, Any]:
        """Settings for the counting process, as JSON; only called where `counted`."""

    def count(self, request: Mapping[str, Any]) -> Mapping[str, ExactCounts]:
        """Inside the counting process: exact counts by arm.

        Args:
            request: `config` (of `counted_as`), `plants`, `arms` {name: collectors that are on},
                `all_collectors` (the arm `all` means all that this tree has).
        """

    def to_order(self, settings: Any, cache: Callable[[Path, str], Path]) -> dict[str, Any]:
        """Settings for a process of a gate, as JSON. Only those that differ from the defaults: base may not
        know the newest.

        Args:
            cache: (the folder of prepared data, the folder of the code that prepares it) -> the folder for
                this process.
        """

    def from_order(self, order: Mapping[str, Any]) -> Any:
        """The settings that `to_order` wrote."""

    def trace(self, settings: Any, steps: int) -> list[tuple[int, float, float]]:
        """(step, loss, gradient norm) of the first steps of real training; only called where `counted`."""


class Marks(Protocol):
    """How step boundaries are timed."""

    def reserve(self, steps: int) -> None:
        """Make room for `steps` marks, so that none is made while a segment runs."""

    def begin(self) -> None:
        """Everything before is finished: the first mark."""

    def mark(self, index: int) -> None:
        """The end of measured step `index`."""

    def end(self, steps: int) -> tuple[float, tuple[float, ...]]:
        """Everything is finished: seconds of the whole, and of each step."""


class HostMarks:
    """Boundaries by the host's clock: right where a step's work is done when its boundary is reached."""

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock_ns = clock_ns
        self._times: list[int] = [0] * 64

    def reserve(self, steps: int) -> None:
        if len(self._times) < steps + 1:
            self._times = [0] * (steps + 1)

    def begin(self) -> None:
        self._times[0] = self._clock_ns()

    def mark(self, index: int) -> None:
        self._times[index + 1] = self._clock_ns()

    def end(self, steps: int) -> tuple[float, tuple[float, ...]]:
        times = self._times[: steps + 1]
        each = tuple((b - a) * 1e-9 for a, b in itertools.pairwise(times))
        return (times[steps] - times[0]) * 1e-9, each


def busy_wait(nanoseconds: int) -> int:
    """Keep a core busy without holding the GIL (sha256 lets it go for large input); the last stretch holds
    it.

    Returns the nanoseconds that it took.
    """
    started = time.perf_counter_ns()
    while nanoseconds - (time.perf_counter_ns() - started) > 150_000:
        hashlib.sha256(_BLOCK)
    while time.perf_counter_ns() - started < nanoseconds:
        pass
    return time.perf_counter_ns() - started


_BLOCK = bytes(65536)
