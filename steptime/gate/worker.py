"""One persistent worker process of a gate: `python -m bench.gate_worker`, JSON lines on stdin and stdout.

    parent  {"subject": "trainer", "config": {...}, "inject": "" or "5@tick", "trace_steps": 0}
    worker  {"hello": {"protocol": 3, "root": ..., "groups": 4, "switches": [...], "periods": {"tick": 1.0},
                       "versions": {...}}}
    parent  {"on": [...], "steps": 1, "group": 0, "layer": "path", "pair": 7, "half": 1}   many times
    worker  {"segment": {...}}
    parent  {"stop": true}
    worker  {"result": {"losses": [[step, loss], ...], "peak_memory_bytes": ...}}

Between two turns the worker stands still inside its step boundary, so that the other process has the machine.
Each side of a gate runs the worker of its own tree: what the trainer's parts are called is its own affair,
only this protocol must agree, and what a segment is (3: steps on one repeated group of batches, with ticks
and flushes on demand). It changes by a new number."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from steptime.errors import UserError
from steptime.machine import identity
from steptime.records.pairs import Layer, Request, Segment
from steptime.subjects.injection import parse_injection
from steptime.subjects.pairs import Wanted
from steptime.subjects.protocol import SubjectKind

PROTOCOL = 3


class Lines:
    """The two ends of the conversation."""

    def __init__(self, source: TextIO, sink: TextIO) -> None:
        self._source, self._sink = source, sink

    def read(self) -> dict[str, Any]:
        """The next message; a parent that is gone counts as a stop."""
        line = self._source.readline()
        return json.loads(line) if line.strip() else {"stop": True}

    def write(self, **message: Any) -> None:
        self._sink.write(json.dumps(message) + "\n")
        self._sink.flush()

    def requests(self) -> Iterator[Wanted]:
        """One for each turn that the parent gives."""
        while not (message := self.read()).get("stop"):
            yield Request(
                frozenset(message["on"]),
                message["steps"],
                message["group"],
                Layer(message["layer"]),
                message["pair"],
                message["half"],
            )

    def segment(self, segment: Segment) -> None:
        self.write(segment=dataclasses.asdict(segment))


def serve(lines: Lines, register: Callable[[], object] = lambda: None) -> None:
    """Build what the first message asks for, and measure until the parent stops it.

    Args:
        register: adds the subjects of a trainer to those that are known.
    """
    from steptime.subjects.registry import find  # heavy: torch

    register()

    order = lines.read()
    if order.get("stop"):
        return
    kind = find(order["subject"])
    settings = _settings(kind, order["config"])
    if order["trace_steps"]:
        lines.write(trace=kind.trace(settings, order["trace_steps"]))
        return
    injections = [parse_injection(order["inject"])] if order["inject"] else []
    subject = kind.make_pairs(settings, injections=injections)
    try:
        subject.open()
        root = str(kind.root)
        about = {"protocol": PROTOCOL, "root": root, "versions": identity.identify().versions}
        shape = {"groups": subject.groups, "switches": list(subject.switches)}
        lines.write(hello={**about, **shape, "periods": dict(subject.periods)})
        result = subject.run_pairs(lines.requests(), lines.segment)
    finally:
        subject.close()
    lines.write(
        result={
            "losses": list(result.losses),
            "peak_memory_bytes": result.peak_memory_bytes,
            "notes": result.notes,
            "faults": result.faults,
        }
    )


def _settings(kind: SubjectKind, order: Mapping[str, Any]) -> Any:
    """The settings of an order. Raises UserError, naming each setting that this tree does not know."""
    try:
        return kind.from_order(order)
    except ValidationError as error:
        told = "; ".join(
            f"does not know `{_key(fault)}`"
            if fault["type"] == "extra_forbidden"
            else f"does not accept `{_key(fault)}`: {fault['msg']}"
            for fault in error.errors()
        )
        raise UserError(told) from None


def _key(fault: ErrorDetails) -> str:
    return ".".join(map(str, fault["loc"]))


def main(register: Callable[[], object] = lambda: None) -> int:
    """Talk on what stdout was; whatever prints meanwhile goes to stderr and cannot garble the
    conversation."""
    sink = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lines = Lines(sys.stdin, sink)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # through every `finally`, not past them
    try:
        serve(lines, register)
    except UserError as error:
        lines.write(error=str(error))
        return 2
    return 0
