"""The receipt that a run leaves, whatever its verdict: what was measured, what was concluded, and why; read
back strictly."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from steptime.errors import UserError
from steptime.records import receipt_1
from steptime.records.costs import KnownCost, SwitchCost
from steptime.records.pairs import Layer, Pair
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
from steptime.timeline.picture import Rounds

SCHEMA: Final = "dflash-bench/receipt/2"


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
class SegmentLengths:
    """How long segments were.

    Attributes:
        steps: by layer.
        settled_steps: fewest steps at which a planted wait costs what it costs in long segments.
    """

    __pydantic_config__ = STRICT

    steps: dict[Layer, int]
    settled_steps: int = 1


@dataclass(frozen=True, slots=True)
class SentinelTimes:
    """Seconds of the pinned reference workload of each device before and after the run."""

    __pydantic_config__ = STRICT

    before_s: dict[str, float]
    after_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a run leaves, as JSON of schema `dflash-bench/receipt/2`. Unknown schema and unknown keys are
    refused by name.

    Attributes:
        pairs: every pair, in the order taken.
        seconds_per: seconds between two events of each layer (path: 1), by which a tick becomes a share.
        collectors: what was said of each switch, in table order; the placebo is apart.
        all: of all together (gate: of head).
        placebo: of the switch that does nothing; it shows the noise.
        control: of the switch that loses a known time; None: the run had none.
        cross_check_percent: least squares over pairs of both questions, (cost, standard error), percent; it
            takes costs to add up.
        headline: the strongest true statement.
        reasons: why the verdict is what it is, the weightiest first.
        accepted: changes that were let through for a stated reason, one line each.
        rounds: pictures of one round of all off and one of all on; None where nothing was recorded.
        options: seed, planted fault, injected slowdown, minutes, why it stopped, ...
        extra: what a command adds of its own (gate: both commits, memory, slowest steps).
    """

    __pydantic_config__ = STRICT

    command: str
    commit: Commit
    machine: Machine
    config: ConfigRef
    pairs: tuple[Pair, ...]
    losses_equal: bool | None
    collectors: tuple[SwitchCost, ...]
    all: SwitchCost | None
    throughput: Throughput | None
    baseline: BaselineView
    pipeline_efficiency: float | None
    verdict: Verdict
    exit_code: ExitCode
    schema: str = SCHEMA
    created: str = ""
    """UTC, ISO 8601."""
    headline: str = ""
    budget_percent: float = 1.0
    collector_budget_percent: float = 0.5
    reasons: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    placebo: SwitchCost | None = None
    control: KnownCost | None = None
    cross_check_percent: dict[str, tuple[float, float]] = field(default_factory=dict)
    seconds_per: dict[Layer, float] = field(default_factory=dict)
    lengths: SegmentLengths | None = None
    minutes: float = 0.0
    """That pairs took."""
    sentinel: SentinelTimes | None = None
    counts: dict[str, ExactCounts] = field(default_factory=dict)
    before: MachineState | None = None
    after: MachineState | None = None
    subject: str = ""
    rounds: Rounds | None = None
    options: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self, indent: int | None = 1) -> str:
        """The receipt as JSON text; key order is the field order with `schema` first. A pair stands on one
        line, and so do the rounds; a receipt without rounds has no such key."""
        tree = _ADAPTER.dump_python(self, mode="json")
        rounds = tree.pop("rounds")
        pairs = [json.dumps(pair, allow_nan=False) for pair in tree.pop("pairs")]
        text = json.dumps({"schema": tree.pop("schema"), **tree}, indent=indent, allow_nan=False)
        line = "\n" if indent is not None else ""
        rows = f",{line}".join(pairs)
        shown = "" if rounds is None else f' "rounds": {json.dumps(rounds, allow_nan=False)},{line}'
        return f'{text[:-1].rstrip()},{line}{shown} "pairs": [{line}{rows}]{line}}}'

    @staticmethod
    def from_json(text: str, where: str = "receipt") -> Receipt:
        """Read a receipt, of this schema or the one before. Raises UserError for broken JSON, another schema,
        unknown or missing keys, each by name."""
        if receipt_1.is_old(text):
            return _upgraded(receipt_1.from_json(text, where))
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


def _upgraded(old: receipt_1.OldReceipt) -> Receipt:
    """What of a receipt of the first schema still holds: its conclusions, its machine, and the pairs of a
    gate. Its intervals are of estimators that are gone."""
    return Receipt(
        command=old.command,
        commit=old.commit,
        machine=old.machine,
        config=old.config,
        pairs=receipt_1.pairs(old),
        losses_equal=old.losses_equal,
        collectors=(),
        all=None,
        throughput=old.throughput,
        baseline=BaselineView(**old.baseline),
        pipeline_efficiency=old.pipeline_efficiency,
        verdict=old.verdict,
        exit_code=old.exit_code,
        created=old.created,
        headline="read from a receipt of the first schema, which keeps its intervals",
        budget_percent=old.budget_percent,
        collector_budget_percent=old.collector_budget_percent,
        reasons=old.reasons,
        sentinel=_sentinel(old.extra.get("sentinel")),
        counts=old.counts,
        before=old.before,
        after=old.after,
        subject=old.subject,
        options=old.options,
        extra=old.extra,
    )


def _sentinel(tree: dict[str, Any] | None) -> SentinelTimes | None:
    """The first receipts had one time for all devices together."""
    if not tree:
        return None
    times = {
        key: dict(value) if isinstance(value, dict) else {"together": float(value)}
        for key, value in tree.items()
    }
    return SentinelTimes(**times)


_ADAPTER: Final = TypeAdapter(Receipt)
