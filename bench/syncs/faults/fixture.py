"""A worker and a monitor in miniature, to see what a way makes of a planted fault.

    python -m bench.syncs.faults.fixture WAY    own process: {fault: {"claimed": bool, "hits": {kind: count}}}

One "drafter" thread does steps (forward, backward, the plant's place behind it) and one "monitor" thread
ticks; first with the plant off, then on. What the way counted more is compared with what was planted: right
role, right line?"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.syncs.faults.planted import COUNTED, PLANTED, PlantedFault, make_plant
from bench.syncs.ways.lint import ROLE as SOURCE
from bench.syncs.ways.lint import LintWay
from bench.syncs.ways.registry import make_way
from dflash.device import Device
from steptime.counting.difference import CountRow, Counts, difference
from steptime.counting.ways.way import Way
from steptime.errors import UserError

STEPS = 3
DRAFTER, MONITOR = "drafter/0", "monitor"


@dataclass(frozen=True)
class Found:
    """What a way made of a fault.

    Attributes:
        rows: everything that it counted more with the fault than without.
        hits: those with the right role and a line of the fault, as often as the fault happened (source is
            read once, and a cache can be empty already).
    """

    way: str
    fault: PlantedFault
    rows: tuple[CountRow, ...]
    hits: tuple[CountRow, ...]

    @property
    def kinds(self) -> str:
        """The kinds of the hits, syncs first."""
        return ", ".join(dict.fromkeys(row.kind for row in self.hits))


def try_fault(way: Way, fault: PlantedFault) -> Found:
    """Run the miniature under a way. The way must be available."""
    off, on = _read_source(fault) if way.device == "source" else _run(way, fault)
    file, lines = fault.lines()
    rows = difference(off, on)
    role = SOURCE if way.device == "source" else fault.role
    hits = [
        row for row in rows if row.role == role and _same(row.place.file, file) and row.place.line in lines
    ]
    least = 1 if not way.every_step else STEPS
    return Found(way.name, fault, tuple(rows), tuple(row for row in hits if row.on - row.off >= least))


def _same(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()


def _read_source(fault: PlantedFault) -> tuple[Counts, Counts]:
    file, lines = fault.lines()
    counts = LintWay([Path(file)]).counts()
    return {}, {key: n for key, n in counts.items() if key[2].line in lines}


def _run(way: Way, fault: PlantedFault) -> tuple[Counts, Counts]:
    plant = make_plant(fault.name)
    device = Device(way.device) if way.device != "meta" else _meta_device()
    plant.device = device
    weight = torch.nn.Parameter(torch.ones(8, device=device.torch))
    if fault.where == "backward":
        weight.register_hook(plant.in_backward)
    totals: list[Counts] = []

    def step() -> None:
        loss = (weight * weight).sum()
        loss.backward()
        plant.after_backward(loss)

    def drafter() -> None:
        with way.arm(DRAFTER):
            _phases(plant.switch, step, lambda: totals.append(way.counts()))

    def monitor() -> None:
        with way.arm(MONITOR):
            _phases(plant.switch, plant.mischief, lambda: totals.append(way.counts()))

    for body in (drafter, monitor):
        _in_thread(body)
    # In each thread: warm, without, with.
    first, second, third, fourth, fifth, sixth = totals
    off = _sum(_minus(second, first), _minus(fifth, fourth))
    return off, _sum(_minus(third, second), _minus(sixth, fifth))


def _phases(switch: Callable[[bool], None], work: Callable[[], None], read: Callable[[], None]) -> None:
    for on in (True, False, True):
        switch(on)
        for _ in range(STEPS):
            work()
        read()
    switch(False)


def _in_thread(body: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _meta_device() -> Device:
    from bench.syncs.ways.fake_device import MetaDevice

    return MetaDevice("meta")


def _minus(after: Counts, before: Counts) -> Counts:
    return {key: n - before.get(key, 0) for key, n in after.items() if n != before.get(key, 0)}


def _sum(one: Counts, other: Counts) -> Counts:
    return {key: one.get(key, 0) + other.get(key, 0) for key in {*one, *other}}


def main(argv: Sequence[str]) -> int:
    """Try every fault under one way, on CUDA where it can; print JSON."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        way = make_way(argv[0], device)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if (reason := way.available()) is not None:
        print(f"error: {way.name}: unavailable: {reason}", file=sys.stderr)
        return 4
    tree = {}
    for name in COUNTED:
        found = try_fault(way, PLANTED[name])
        tree[name] = {
            "claimed": name in way.claims,
            "hits": {row.kind: row.on - row.off for row in found.hits},
        }
    print(json.dumps(tree))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
