"""Stored throughput, one reviewed JSON file for each machine and config: read, match, compare.
(`recording.py` writes them.)

`baselines/<machine>/<config>.json`. Strict: an unknown key or a broken file is refused by name and line. A
baseline never serves another machine. The unit is the session (a fresh launch): what changes between sessions
is invisible inside one, so the limit is mean - t(1-alpha, m-1) s_B sqrt(1/r + 1/m) for r new sessions against
m stored ones, on logs. A *stated* figure has no spread; it is a constant floor for its machine and config,
less its rounding."""

from __future__ import annotations

import enum
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import numpy as np
from pydantic import TypeAdapter
from scipy import special

from steptime.errors import UserError
from steptime.machine.identity import differences
from steptime.machine.sentinel import MOVED_PERCENT
from steptime.records.receipt import BaselineView
from steptime.records.strict_json import line_of
from steptime.records.strict_json import parse as parse_stored
from steptime.records.types import STRICT, ConfigRef, ExitCode, Machine, Throughput, Verdict

SCHEMA: Final = "dflash-bench/baseline/1"
ROOT: Final = Path(__file__).resolve().parents[2] / "baselines"
ALPHA: Final = 0.01
"""Error of the limit: one false alarm in 100 comparisons."""
MIN_SESSIONS: Final = 3
STALE_PERCENT: Final = 20.0
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


class Status(enum.StrEnum):
    """How what is stored stands to this machine and config."""

    MATCH = "match"
    OTHER_MACHINE = "other-machine"
    OTHER_CONFIG = "other-config"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Match:
    """The stored figure for a machine and config, or why there is none.

    Attributes:
        baseline, path: of the match, or of the one that belongs elsewhere.
        message: one line; names the command that records when nothing fits.
    """

    status: Status
    baseline: Baseline | None
    path: Path | None
    message: str

    @property
    def exit_code(self) -> ExitCode:
        """0 for a match, 4 for another machine or config, 5 when there is none."""
        if self.status is Status.MATCH:
            return ExitCode.WITHIN
        return ExitCode.INCOMPLETE if self.status is Status.MISSING else ExitCode.INVALID


def record_command(config_name: str, subject: str = "trainer") -> str:
    """The command that records a baseline for a config, or for a subject of the user's."""
    if subject in ("hf", "lightning"):
        return f"steptime baseline record --{subject} -- SCRIPT ARGS"
    if subject not in ("trainer", "spin"):
        return f"steptime baseline record --subject {subject}"
    return f"python -m bench baseline record --config configs/{config_name}.toml"


def match(stored: dict[Path, Baseline], machine: Machine, config: ConfigRef) -> Match:
    """Pure: the baseline of this machine and config, or the nearest thing that is not one."""
    named = {
        path: b for path, b in stored.items() if b.config.name == config.name or path.stem == config.name
    }
    ours = {path: b for path, b in named.items() if b.belongs_to(machine)}
    measured_first = sorted(ours.items(), key=lambda item: item[1].origin != "measured")
    for path, baseline in measured_first:
        if baseline.fits(config) or baseline.config.hash is None:
            return Match(Status.MATCH, baseline, path, f"{path}: {_describe(baseline)}")
    command = record_command(config.name)
    for path, baseline in measured_first:
        return Match(
            Status.OTHER_CONFIG,
            baseline,
            path,
            f"{path} was recorded with other settings (config {baseline.config.hash}, now {config.hash}); "
            f"record anew: {command}",
        )
    for path, baseline in named.items():
        return Match(
            Status.OTHER_MACHINE,
            baseline,
            path,
            f"{path} belongs to another machine ({baseline.machine.key}; this is {machine.key}); record one "
            f"for this: {command}",
        )
    return Match(
        Status.MISSING,
        None,
        None,
        f"no baseline for config {config.name!r} on {machine.key}; record one: {command}",
    )


def _describe(baseline: Baseline) -> str:
    spread = baseline.between_session_spread_percent
    how = "stated" if spread is None else f"{len(baseline.sessions)} sessions, spread {spread:.2f}%"
    return f"{baseline.value:,.0f} {baseline.unit} ({how}, {baseline.date})"


def limit(baseline: Baseline, sessions: int = 1) -> float:
    """Tokens/s under which `sessions` new sessions (their geometric mean) miss the baseline, at one false
    alarm in 100."""
    floor = baseline.value * (1.0 - baseline.tolerance_percent / 100.0)
    if baseline.origin == "stated" or baseline.between_session_spread_percent is None:
        return floor
    m, spread = len(baseline.sessions), baseline.between_session_spread_percent / 100.0
    return min(floor, baseline.value * math.exp(-multiplier(m, sessions) * spread))


def multiplier(stored: int, new: int, alpha: float = ALPHA) -> float:
    """Multiple of the between-session spread that a drop must exceed: t(1-alpha, m-1) sqrt(1/r + 1/m)."""
    return float(special.stdtrit(stored - 1, 1.0 - alpha)) * math.sqrt(1.0 / new + 1.0 / stored)


def stale_percent(baseline: Baseline) -> float:
    """Percent above the stored figure from which it is stale: a run that fast would pass with a loss as large
    as that."""
    return STALE_PERCENT + 100.0 * (baseline.value / limit(baseline) - 1.0)


@dataclass(frozen=True, slots=True)
class Comparison:
    """New sessions held against a baseline."""

    verdict: Verdict
    value: float
    limit: float
    change_percent: float
    message: str


def machine_moved(baseline: Baseline, now: Sequence[Session]) -> str:
    """Why the machine is not the one that it was, by the sentinel of the stored sessions; empty when it is,
    or when the file has none."""
    lines = []
    for device in baseline.sessions[0].sentinel_s if baseline.sessions else ():
        old = [s.sentinel_s[device] for s in baseline.sessions if device in s.sentinel_s]
        new = [s.sentinel_s[device] for s in now if device in s.sentinel_s]
        if not new:
            continue
        change = 100.0 * (geometric_mean(new) / geometric_mean(old) - 1.0)
        # What sessions of the baseline differed by among themselves is this machine's way.
        spread = 100.0 * (max(old) / min(old) - 1.0)
        if abs(change) > MOVED_PERCENT + spread:
            lines.append(f"{device} by {change:+.1f}%")
    if not lines:
        return ""
    return f"the sentinel workload is not what it was when the baseline was recorded ({', '.join(lines)})"


def compare(baseline: Baseline, now: Sequence[Throughput]) -> Comparison:
    """Pure: the verdict of one or more new sessions.

    A measured baseline: `over` under the limit, else `within`. A stated one is a constant, so only the new
    run's own interval counts: `over` when all of it lies under the floor, `within` when all of it lies above,
    else `unresolved`. Far above it the figure is stale, and passes nothing: `no-baseline`.

    Raises:
        ValueError: no session.
    """
    if not now:
        raise ValueError("no session to compare")
    value, lowest = geometric_mean([s.tokens_per_second for s in now]), limit(baseline, len(now))
    if baseline.origin == "stated":
        low, high = geometric_mean([s.low for s in now]), geometric_mean([s.high for s in now])
        verdict = Verdict.OVER if high < lowest else Verdict.WITHIN if low >= lowest else Verdict.UNRESOLVED
    else:
        verdict = Verdict.OVER if value < lowest else Verdict.WITHIN
    change = 100.0 * (value / baseline.value - 1.0)
    text = f"{value:,.1f} tokens/s, {change:+.2f}% against {_describe(baseline)}; limit {lowest:,.1f}"
    if verdict is Verdict.WITHIN and change > stale_percent(baseline):
        verdict = Verdict.NO_BASELINE
        text = f"stale: {text}; record anew: {record_command(baseline.config.name)}"
    return Comparison(verdict, value, lowest, change, text)


def view(
    machine: Machine, config: ConfigRef, throughput: Throughput | None, root: Path = ROOT
) -> BaselineView:
    """How the stored figures look from this run, for the receipt; with none of its own, one of this machine.

    Raises:
        UserError: a broken file.
    """
    stored = read_all(root)
    found = match(stored, machine, config)
    baseline, status, note = found.baseline, found.status, found.message
    ours = next((entry for entry in stored.items() if entry[1].belongs_to(machine)), None)
    if baseline is None and ours is not None:
        # Another machine's figure says nothing here; one of this machine says at least what it once did.
        path, baseline = ours
        status = Status.OTHER_CONFIG
        note = f"{path}: {_describe(baseline)} belongs to config {baseline.config.name!r}. {note}"
    if baseline is None:
        return BaselineView(status=status.value, note=note)
    judged = compare(baseline, [throughput]) if status is Status.MATCH and throughput is not None else None
    if judged is not None:
        changed = differences(baseline.versions, machine.versions) if baseline.versions else []
        note = "; ".join([judged.message, *changed])
    return BaselineView(
        status=status.value,
        value=baseline.value,
        origin=baseline.origin,
        unit=baseline.unit,
        machine=baseline.machine.key,
        config=baseline.config.name,
        commit=baseline.commit,
        date=baseline.date,
        sessions=len(baseline.sessions),
        limit=judged.limit if judged else None,
        verdict=judged.verdict.value if judged else None,
        note=note,
    )


def table(stored: dict[Path, Baseline], machine: Machine) -> list[dict[str, str]]:
    """Rows for `baseline list`."""
    return [
        {
            "machine": baseline.machine.key,
            "config": baseline.config.name,
            "tokens/s": f"{baseline.value:,.1f}",
            "origin": baseline.origin,
            "sessions": str(len(baseline.sessions)),
            "spread": ""
            if baseline.between_session_spread_percent is None
            else f"{baseline.between_session_spread_percent:.2f}%",
            "date": baseline.date,
            "commit": (baseline.commit or "")[:12],
            "this machine": "yes" if baseline.belongs_to(machine) else "no",
        }
        for baseline in stored.values()
    ]


def geometric_mean(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))
