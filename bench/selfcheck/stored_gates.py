"""Gates of a self-check as they were measured, one JSON line each: judged again, added up over sessions, or
slowed on paper."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from bench.gate.verdict import HEAD, GateEvidence, Launch
from bench.records.strict_json import explain
from bench.records.types import STRICT, MachineState, Segment
from steptime.errors import UserError


@dataclass(frozen=True, slots=True)
class Trial:
    """One gate of a tree against itself.

    Attributes:
        subject: what was run.
        inject_percent: share of the throughput that head lost on purpose.
        minutes: given to the gate.
        seed: of its order.
        machine: in words.
        commit: of the tree; empty in gates kept before it was noted.
        segments: of all launches.
    """

    __pydantic_config__ = STRICT

    subject: str
    inject_percent: float
    minutes: float
    seed: int
    machine: str
    cycle: int
    segments: tuple[Segment, ...]
    commit: str = ""
    incomplete: tuple[str, ...] = ()
    not_comparable: tuple[str, ...] = ()
    before: MachineState | None = None
    after: MachineState | None = None

    def evidence(self) -> GateEvidence:
        """What the gate's verdict is taken from."""
        processes = sorted({segment.process for segment in self.segments})
        return GateEvidence(
            launches=[Launch([s for s in self.segments if s.process == process]) for process in processes],
            cycle=self.cycle,
            incomplete=list(self.incomplete),
            not_comparable=list(self.not_comparable),
            before=self.before,
            after=self.after,
        )


def slowed(evidence: GateEvidence, percent: float) -> GateEvidence:
    """The same gate with a head that loses `percent` of its throughput, evenly: real noise, and a cost known
    exactly."""
    factor = 1.0 / (1.0 - percent / 100.0)

    def slow(segment: Segment) -> Segment:
        if segment.arm != HEAD:
            return segment
        return replace(
            segment,
            seconds=segment.seconds * factor,
            step_seconds=tuple(s * factor for s in segment.step_seconds),
        )

    return replace(
        evidence,
        launches=[replace(one, segments=[slow(s) for s in one.segments]) for one in evidence.launches],
    )


def append(path: Path, trial: Trial) -> None:
    """Add one line; times in whole nanoseconds."""
    short = [
        replace(s, step_seconds=tuple(round(t, 9) for t in s.step_seconds), step_tokens=())
        for s in trial.segments
    ]
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(replace(trial, segments=tuple(short)))) + "\n")


def read(path: Path) -> Iterator[Trial]:
    """Every trial of a file.

    Raises:
        UserError: naming file and line.
    """
    adapter = TypeAdapter(Trial)
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield adapter.validate_json(line)
                except ValidationError as error:
                    raise UserError(
                        f"{path}:{number}: {explain(error)}; want a gates.jsonl of `bench selfcheck`"
                    ) from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; want a gates.jsonl of `bench selfcheck`") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: {error}; want a gates.jsonl of `bench selfcheck`") from None
