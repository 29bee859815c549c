"""Whether a stored figure is this machine's and this config's, and whether new sessions are within it.

A baseline never serves another machine. The limit is mean - t(1-alpha, m-1) s_B sqrt(1/r + 1/m) for r new
sessions against m stored ones, on logs. A *stated* figure has no spread; it is a constant floor for its
machine and config, less its rounding."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scipy import special

from steptime.baselines.store import ROOT, Baseline, Session, geometric_mean, read_all
from steptime.machine.identity import differences
from steptime.machine.sentinel import MOVED_PERCENT
from steptime.records.receipt import BaselineView
from steptime.records.types import ConfigRef, ExitCode, Machine, Throughput, Verdict

ALPHA: Final = 0.01
"""Error of the limit: one false alarm in 100 comparisons."""
STALE_PERCENT: Final = 20.0


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
