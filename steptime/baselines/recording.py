"""Recording a baseline: receipts of several fresh launches in, one reviewed file out.

By hand, on a clean tree, from runs that are valid; never by CI.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from steptime.baselines.store import (
    MIN_SESSIONS,
    ROOT,
    TOLERANCE_PERCENT,
    Baseline,
    BaselineConfig,
    BaselineMachine,
    Session,
    geometric_mean,
    parse,
    to_json,
)
from steptime.errors import UserError
from steptime.files import atomic_text
from steptime.records.pairs import ALL
from steptime.records.receipt import Receipt
from steptime.records.types import OFF, Commit, ConfigRef, ExitCode, Machine, Verdict
from steptime.statistics.throughput import all_segments, off_segments, on_segments


def stale(receipt: Receipt, machine: Machine, config: ConfigRef, commit: Commit) -> list[str]:
    """Why a receipt does not speak of this code, config and machine; empty: it does. Pure."""
    reasons = []
    if receipt.machine.key != machine.key:
        reasons.append(f"it was measured on another machine ({receipt.machine.key}; this is {machine.key})")
    if (receipt.config.name, receipt.config.hash) != (config.name, config.hash):
        reasons.append(
            f"it was measured with config {receipt.config.name} {receipt.config.hash}, not {config.name} "
            f"{config.hash}"
        )
    if receipt.commit.id != commit.id:
        reasons.append(
            f"it is stale: measured at commit {receipt.commit.id[:12]}, the code is at {commit.id[:12]}"
        )
    elif receipt.commit.diff_hash != commit.diff_hash:
        reasons.append("it is stale: the uncommitted changes are not those it was measured with")
    return reasons


def unusable(
    receipt: Receipt, machine: Machine, config: ConfigRef, commit: Commit, subject: str = "trainer"
) -> list[str]:
    """Why a receipt cannot become a session of a baseline here and now; empty: it can. Pure."""
    reasons = stale(receipt, machine, config, commit)
    if receipt.command != "overhead" or receipt.subject != subject:
        reasons.append(
            f"it is of `{receipt.command}` on the subject {receipt.subject!r}, not of `overhead` on "
            f"{'the trainer' if subject == 'trainer' else 'subject ' + repr(subject)}"
        )
    if receipt.commit.dirty:
        reasons.append("it was measured on a tree with uncommitted changes")
    if receipt.verdict is Verdict.INVALID or receipt.exit_code in (ExitCode.INVALID, ExitCode.INCOMPLETE):
        reasons.append(f"its verdict is {receipt.verdict.value}: {'; '.join(receipt.reasons[:1])}")
    for name in ("inject", "inject_percent", "plant"):
        if receipt.options.get(name):
            reasons.append(f"it was measured with {name.replace('_percent', '')} {receipt.options[name]}")
    return reasons


def empty(receipt: Receipt) -> str:
    """Why a receipt holds nothing to record or compare; empty: it holds pairs with everything off. Pure."""
    if receipt.throughput is None:
        return "it holds no throughput"
    return "" if off_segments(receipt.pairs) else "it holds no segment with everything off"


def repeated(receipts: Sequence[tuple[str, Receipt]]) -> list[str]:
    """Receipts that are there twice, one line each: a session counts once. Pure."""
    seen: dict[str, str] = {}
    reasons = []
    for where, receipt in receipts:
        text = receipt.to_json(indent=None)
        if text in seen:
            reasons.append(f"{where} is the same session as {seen[text]}")
        seen.setdefault(text, where)
    return reasons


def session_of(receipt: Receipt) -> Session:
    """A receipt as one session. Raises UserError for one that holds nothing."""
    missing = empty(receipt)
    if missing or receipt.throughput is None:
        raise UserError(f"the receipt cannot be a session: {missing}")
    by_name = {OFF: off_segments(receipt.pairs)}
    names = [cost.name for cost in receipt.collectors]
    by_name |= {name: on_segments(receipt.pairs, name) for name in names}
    by_name[ALL] = all_segments(receipt.pairs)
    sentinel = receipt.sentinel
    return Session(
        round(receipt.throughput.tokens_per_second, 3),
        receipt.created,
        {
            name: round(geometric_mean([segment.tokens / segment.seconds for segment in segments]), 3)
            for name, segments in by_name.items()
            if segments
        },
        {}
        if sentinel is None
        else {name: (sentinel.before_s[name] + sentinel.after_s[name]) / 2 for name in sentinel.before_s},
    )


def change_percent(stored: Baseline, now: Baseline) -> float:
    """How much faster (positive) the new figure is."""
    return 100.0 * (now.value / stored.value - 1.0)


def build(
    machine: Machine,
    config: ConfigRef,
    sessions: Sequence[Session],
    commit: str,
    note: str = "",
    date: str | None = None,
) -> Baseline:
    """A measured baseline. Raises UserError with fewer than three sessions."""
    if len(sessions) < MIN_SESSIONS:
        raise UserError(
            f"a baseline needs at least {MIN_SESSIONS} sessions (fresh launches), got {len(sessions)}"
        )
    logs = np.log([session.tokens_per_second for session in sessions])
    models = [model for model, _ in machine.gpus]
    return Baseline(
        machine=BaselineMachine(
            machine.key, models[0] if models else "", len(models), machine.cpu_model, machine.cpus
        ),
        config=BaselineConfig(config.name, config.hash),
        value=round(float(np.exp(logs.mean())), 3),
        origin="measured",
        tolerance_percent=TOLERANCE_PERCENT,
        date=date or datetime.now(UTC).date().isoformat(),
        sessions=tuple(sessions),
        between_session_spread_percent=round(100.0 * float(logs.std(ddof=1)), 4),
        commit=commit,
        versions=dict(machine.versions),
        note=note,
    )


def refuse_recording(*, dirty: bool, environment: Mapping[str, str] = os.environ) -> None:
    """Raises UserError on a tree with uncommitted changes, and in CI: baselines are recorded by hand and
    reviewed."""
    if dirty:
        raise UserError("baseline record: the tree has uncommitted changes; commit them first")
    if environment.get("CI", "").lower() not in ("", "0", "false"):
        raise UserError(
            "baseline record: CI never writes baselines; record by hand and have the file reviewed"
        )


def write(baseline: Baseline, root: Path = ROOT) -> Path:
    """Write the file whole or not at all (temporary file, fsync, rename). Returns its path."""
    path = root / baseline.machine.key / f"{baseline.config.name}.json"
    text = to_json(baseline)
    parse(text, str(path))
    with atomic_text(path) as file:
        file.write(text)
    return path
