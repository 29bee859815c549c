"""Stored throughput, one reviewed JSON file for each machine and config, and its strict reader.
(`recording.py` writes them, `comparing.py` holds a run against them.)

`baselines/<machine>/<config>.json`. An unknown key or a broken file is refused by name and line. The unit is
the session (a fresh launch): what changes between sessions is invisible inside one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import numpy as np
from pydantic import TypeAdapter

from steptime.errors import UserError
from steptime.records.strict_json import line_of
from steptime.records.strict_json import parse as parse_stored
from steptime.records.types import STRICT, ConfigRef, Machine

SCHEMA: Final = "dflash-bench/baseline/1"
ROOT: Final = Path(__file__).resolve().parents[2] / "baselines"
MIN_SESSIONS: Final = 3
TOLERANCE_PERCENT: Final = 0.5
"""A measured baseline is never missed by less, however small its spread."""


@dataclass(frozen=True, slots=True)
class BaselineMachine:
    """Whose figure it is. `key`: the folder's name, and for a measured one the machine's key.

    A stated figure knows no UUIDs: it belongs to machines with `gpu_count` GPUs whose model holds
    `gpu_model`."""

    __pydantic_config__ = STRICT

    key: str
    gpu_model: str = ""
    gpu_count: int = 0
    cpu_model: str = ""
    cpus: int = 0


@dataclass(frozen=True, slots=True)
class Session:
    """One fresh launch.

    Attributes:
        tokens_per_second: with everything off.
        arms: tokens/s under "off", "all", and each collector's name (its segments, in which each of the
            others was on half of the time).
        sentinel_s: seconds of the pinned reference workload by device, the mean of before and after; empty in
            files of older harnesses.
    """

    __pydantic_config__ = STRICT

    tokens_per_second: float
    date: str
    arms: dict[str, float] = field(default_factory=dict)
    sentinel_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BaselineConfig:
    """The config it holds for. A stated figure has no hash: the name is all that is known."""

    __pydantic_config__ = STRICT

    name: str
    hash: str | None = None


@dataclass(frozen=True, slots=True)
class Baseline:
    """A stored figure.

    Attributes:
        value: tokens/s, the geometric mean of the sessions, or the stated figure.
        tolerance_percent: rounding of a stated figure; of a measured one the least drop that counts.
        between_session_spread_percent: SD of the log over sessions; None when stated.
    """

    __pydantic_config__ = STRICT

    machine: BaselineMachine
    config: BaselineConfig
    value: float
    origin: Literal["stated", "measured"]
    tolerance_percent: float
    date: str
    schema: str = SCHEMA
    unit: Literal["tokens/s"] = "tokens/s"
    direction: Literal["higher is better"] = "higher is better"
    sessions: tuple[Session, ...] = ()
    between_session_spread_percent: float | None = None
    commit: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def arms(self) -> dict[str, float]:
        """Geometric mean tokens/s of every arm that all sessions measured."""
        if not self.sessions:
            return {"off": self.value}
        names = [n for n in self.sessions[0].arms if all(n in s.arms for s in self.sessions)]
        return {n: geometric_mean([s.arms[n] for s in self.sessions]) for n in names} or {"off": self.value}

    def belongs_to(self, machine: Machine) -> bool:
        """Whether this figure may be held against `machine`."""
        if self.origin == "measured" or not self.machine.gpu_model:
            return self.machine.key == machine.key
        models = [model for model, _ in machine.gpus]
        return len(models) == self.machine.gpu_count and all(
            self.machine.gpu_model in model for model in models
        )

    def fits(self, config: ConfigRef) -> bool:
        """Whether it holds for `config`: by hash, or by name where only the name is known."""
        return self.config.name == config.name and self.config.hash in (None, config.hash)


_ADAPTER: Final = TypeAdapter(Baseline)


def parse(text: str, where: str) -> Baseline:
    """A baseline's JSON. Raises UserError with `where:line` for broken JSON, another schema, unknown or
    missing keys."""
    baseline = parse_stored(_ADAPTER, text, SCHEMA, where, Baseline.__slots__)  # type: ignore[attr-defined]
    fault = _contradiction(baseline)
    if fault:
        raise UserError(f"{where}:{line_of(text, fault[0])}: {fault[0]}: {fault[1]}")
    return baseline


def _contradiction(baseline: Baseline) -> tuple[str, str] | None:
    """(key, what is wrong) where the fields do not go together."""
    if baseline.value <= 0:
        return "value", "must be positive"
    if baseline.tolerance_percent < 0:
        return "tolerance_percent", "must not be negative"
    if baseline.origin == "stated":
        return ("sessions", "a stated figure has no sessions") if baseline.sessions else None
    if len(baseline.sessions) < MIN_SESSIONS:
        return "sessions", f"a measured figure needs at least {MIN_SESSIONS}, found {len(baseline.sessions)}"
    mean = geometric_mean([s.tokens_per_second for s in baseline.sessions])
    if not math.isclose(mean, baseline.value, rel_tol=1e-4):
        return "value", f"{baseline.value:g} is not the geometric mean of the sessions, {mean:.6g}"
    return None


def read(path: Path) -> Baseline:
    """Read one file. Raises UserError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: cannot read the baseline: {getattr(error, 'strerror', None) or error}"
        ) from None
    baseline = parse(text, str(path))
    if baseline.machine.key != path.parent.name:
        raise UserError(
            f"{path}:{line_of(text, 'key')}: machine key {baseline.machine.key!r} is not the folder's name"
        )
    return baseline


def folder(tree: Path) -> Path:
    """Where the figures of a tree's code are kept."""
    return ROOT if tree == Path(__file__).resolve().parents[2] else tree / "baselines"


def read_all(root: Path = ROOT) -> dict[Path, Baseline]:
    """Every stored baseline by its path (relative where that is shorter); empty when there is no such folder.

    Raises:
        UserError: for the first broken one.
    """
    return {_shorten(path): read(path) for path in sorted(root.glob("*/*.json"))}


def _shorten(path: Path) -> Path:
    short = Path(os.path.relpath(path))
    return path if short.parts[:1] == ("..",) else short


def to_json(baseline: Baseline) -> str:
    """The file's text, `schema` first."""
    tree = _ADAPTER.dump_python(baseline, mode="json")
    return json.dumps({"schema": tree.pop("schema"), **tree}, indent=2) + "\n"


def geometric_mean(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))
