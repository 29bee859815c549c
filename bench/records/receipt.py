"""The receipt that a run leaves, whatever its verdict: what was measured, what was concluded, and why; read
back strictly."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from bench.records.strict_json import parse
from bench.records.types import (
    STRICT,
    Commit,
    ConfigRef,
    Cost,
    ExactCounts,
    ExitCode,
    Interval,
    Machine,
    MachineState,
    Segment,
    Throughput,
    Verdict,
)
from steptime.errors import UserError

SCHEMA: Final = "dflash-bench/receipt/1"


@dataclass(frozen=True, slots=True)
class BaselineView:
    """How the stored figure stands to this run. `status`: match, other-machine, other-config, missing."""

    __pydantic_config__ = STRICT

    status: str
    value: float | None = None
    origin: str | None = None
    unit: str = "tokens/s"
    machine: str | None = None
    config: str | None = None
    commit: str | None = None
    date: str | None = None
    sessions: int | None = None
    limit: float | None = None
    """Throughput below which the baseline is missed."""
    verdict: str | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a run leaves, as JSON of schema `dflash-bench/receipt/1`. Unknown schema and unknown keys are
    refused by name."""

    __pydantic_config__ = STRICT

    command: str
    commit: Commit
    machine: Machine
    config: ConfigRef
    arms: dict[str, tuple[Segment, ...]]
    losses_equal: bool | None
    collectors: tuple[Cost, ...]
    all: Cost | None
    throughput: Throughput | None
    baseline: BaselineView
    pipeline_efficiency: float | None
    verdict: Verdict
    exit_code: ExitCode
    schema: str = SCHEMA
    created: str = ""
    """UTC, ISO 8601."""
    budget_percent: float = 1.0
    collector_budget_percent: float = 0.5
    reasons: tuple[str, ...] = ()
    """Why the verdict is what it is, the weightiest first."""
    aa: Interval | None = None
    """off-again against off: the harness measured by itself."""
    counts: dict[str, ExactCounts] = field(default_factory=dict)
    losses: dict[str, tuple[float, ...]] = field(default_factory=dict)
    before: MachineState | None = None
    after: MachineState | None = None
    subject: str = ""
    cycle: int = 0
    options: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    """Seed, planted fault, injected slowdown, minutes, stop reason, washout, ..."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What a command adds of its own (gate: both commits, memory, p99)."""

    def to_json(self, indent: int | None = 1) -> str:
        """The receipt as JSON text; key order is the field order with `schema` first."""
        tree = _ADAPTER.dump_python(self, mode="json")
        return json.dumps({"schema": tree.pop("schema"), **tree}, indent=indent, allow_nan=False)

    @staticmethod
    def from_json(text: str, where: str = "receipt") -> Receipt:
        """Read a receipt. Raises UserError for broken JSON, another schema, unknown or missing keys, each by
        name."""
        return parse(_ADAPTER, text, SCHEMA, where, Receipt.__slots__)  # type: ignore[attr-defined]

    @staticmethod
    def read(path: str | Path) -> Receipt:
        """Read a receipt's file. Raises UserError."""
        try:
            return Receipt.from_json(Path(path).read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise UserError(f"{path}: cannot read the receipt: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not a receipt: {error}") from None


_ADAPTER: Final = TypeAdapter(Receipt)
