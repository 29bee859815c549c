"""Receipts of the first schema, `dflash-bench/receipt/1`: read, never written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

from pydantic import TypeAdapter

from steptime.records.pairs import Layer, Pair, Question, Segment
from steptime.records.strict_json import parse
from steptime.records.types import (
    STRICT,
    Commit,
    ConfigRef,
    ExactCounts,
    ExitCode,
    Machine,
    MachineState,
    Throughput,
    Verdict,
)

SCHEMA: Final = "dflash-bench/receipt/1"
BASE, HEAD = "base", "head"


@dataclass(frozen=True, slots=True)
class OldSegment:
    """Some steps of one arm. `round` and `order`: where it stood; `phase`: place in the cycle of its first
    batch."""

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
class OldReceipt:
    """The first schema's keys; `collectors`, `all`, `aa` hold intervals of estimators that are gone."""

    __pydantic_config__ = STRICT

    command: str
    commit: Commit
    machine: Machine
    config: ConfigRef
    arms: dict[str, tuple[OldSegment, ...]]
    losses_equal: bool | None
    collectors: tuple[dict[str, Any], ...]
    all: dict[str, Any] | None
    throughput: Throughput | None
    baseline: dict[str, Any]
    pipeline_efficiency: float | None
    verdict: Verdict
    exit_code: ExitCode
    schema: str = SCHEMA
    created: str = ""
    budget_percent: float = 1.0
    collector_budget_percent: float = 0.5
    reasons: tuple[str, ...] = ()
    aa: dict[str, Any] | None = None
    counts: dict[str, ExactCounts] = field(default_factory=dict)
    losses: dict[str, tuple[float, ...]] = field(default_factory=dict)
    before: MachineState | None = None
    after: MachineState | None = None
    subject: str = ""
    cycle: int = 0
    options: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


_ADAPTER: Final = TypeAdapter(OldReceipt)


def is_old(text: str) -> bool:
    """Whether the text is JSON of the first schema."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(tree, dict) and tree.get("schema") == SCHEMA


def from_json(text: str, where: str) -> OldReceipt:
    """Raises UserError."""
    return parse(_ADAPTER, text, SCHEMA, where, OldReceipt.__slots__)  # type: ignore[attr-defined]


def pairs(old: OldReceipt) -> tuple[Pair, ...]:
    """The pairs of a gate: its rounds were ABBA or BAAB, two pairs each. Empty for any other command."""
    if old.command != "gate":
        return ()
    taken = sorted(
        (segment for arm in (BASE, HEAD) for segment in old.arms.get(arm, ())),
        key=lambda s: (s.process, s.round, s.order),
    )
    return tuple(_pairs(taken))


def _pairs(taken: list[OldSegment]) -> Iterator[Pair]:
    number = 0
    for (process, _), group in groupby(taken, key=lambda s: (s.process, s.round)):
        members = list(group)
        for first, second in zip(members[::2], members[1::2], strict=False):
            if {first.arm, second.arm} == {BASE, HEAD}:
                yield Pair(
                    number, Layer.PATH, Question.EACH, _segment(first), _segment(second), process=process
                )
                number += 1


def _segment(old: OldSegment) -> Segment:
    return Segment(
        on=(HEAD,) if old.arm == HEAD else (),
        steps=old.steps,
        tokens=old.tokens,
        seconds=old.seconds,
        group=old.phase,
        step_seconds=old.step_seconds,
    )
