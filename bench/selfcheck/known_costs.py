"""Costs of known size, found by pairs: estimate beside truth.

    python -m bench.selfcheck.known_costs [--config configs/cpu-tiny.toml] [--minutes 4] [--only target,late]
    python -m bench.selfcheck.known_costs --subject spin

Each part puts costs into one layer of the real trainer, draws pairs with a fair coin for each cost and for a
placebo, and fits them by least squares. A share of the time that is lost in every worker lowers the
throughput by just as much, so its truth is known. A busy loop in another thread costs as much as it takes
from the workers: at most its own time where all of them need the interpreter's lock for each operation, less
where they do not. A cost in one stage alone costs what it takes from the slowest; that its size does not hang
on the segment's length is what is shown."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from tabulate import tabulate

from bench.records.pairs import PLACEBO, Layer, Request, Segment
from bench.records.types import slowdown_percent
from bench.subjects.injection import Injection, Place
from bench.subjects.pairs import PairSubject, steps_to_cover
from dflash.config import load_config

PAIRS_PER_GROUP: Final = 16
"""Pairs on one group of batches, so that lead-in steps are few beside them."""
LEAST_PAIRS: Final = 16


@dataclass(frozen=True, slots=True)
class Part:
    """Some switches in one layer.

    Attributes:
        truth: by switch: percent of the throughput in the path, else milliseconds; NaN where none is known.
        steps: of a segment; of a tick or a flush, where its pilot does not ask for more.
        share: of the time.
    """

    name: str
    layer: Layer
    truth: Mapping[str, float]
    steps: int = 1
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Found:
    """What a part's pairs say of a switch, in the unit of its truth.

    Attributes:
        steps: of a segment.
        uncovered: segments that were shorter than what their tick started.
    """

    part: str
    switch: str
    truth: float
    estimate: float
    error: float
    pairs: int
    steps: int
    uncovered: int


INJECTIONS: Final = (
    Injection(1.0, Place.STEP, "path 1%"),
    Injection(2.0, Place.STEP, "path 2%"),
    Injection(5.0, Place.STEP, "path 5%"),
    Injection(20.0, Place.TARGET, "target 20%"),
    Injection(2.0, Place.TICK, "tick 2%"),
    Injection(2.0, Place.LOCK, "gil 2%"),
    Injection(2.0, Place.THREAD, "thread 2%"),
    Injection(2.0, Place.FLUSH, "flush 2%"),
    Injection(2.0, Place.SINK, "sink 2%"),
)
PLANTS: Final = ("busy_loop", "held_gil")


def parts(periods: Mapping[Layer, float], plants: Sequence[str] = PLANTS) -> tuple[Part, ...]:
    """All of them."""
    named = {one.label: one for one in INJECTIONS}
    tick_s, flush_s = periods[Layer.TICK], periods[Layer.FLUSH]

    def truths(*labels: str) -> dict[str, float]:
        return {
            label: named[label].percent
            if named[label].layer is Layer.PATH
            else 1e3 * named[label].seconds(tick_s, flush_s)
            for label in labels
        }

    unknown = {"target 20%": float("nan")}
    found = [
        Part("path", Layer.PATH, truths("path 1%", "path 2%", "path 5%"), share=3.0),
        Part("target", Layer.PATH, unknown, steps=1),
        Part("target", Layer.PATH, unknown, steps=8),
        Part("tick", Layer.TICK, truths("tick 2%", "gil 2%")),
        Part("flush", Layer.FLUSH, truths("flush 2%", "sink 2%")),
        Part("late", Layer.TICK, truths("thread 2%")),
    ]
    if plants:
        from bench.syncs.faults.planted import BUSY_SHARE, HELD_SHARE

        known = {"busy_loop": BUSY_SHARE, "held_gil": HELD_SHARE}
        found.append(Part("plants", Layer.TICK, {name: 1e3 * known[name] * tick_s for name in plants}))
    return tuple(found)


@dataclass(slots=True)
class Session:
    """The pairs of all parts, on one subject: `requests` and `on_segment` are for its run."""

    parts: Sequence[Part]
    groups: int
    time_s: float
    seed: int = 0
    clock: Callable[[], float] = time.monotonic
    tell: Callable[[Sequence[Found]], None] = lambda found: None
    found: list[Found] = field(default_factory=list)
    taken: list[Segment] = field(default_factory=list)

    def requests(self) -> Iterator[Request]:
        """A step's time first, then part after part."""
        generator = random.Random(self.seed)
        for _ in range(5):
            yield Request(frozenset(), 1, 0)
        step_s = float(np.median([segment.seconds for segment in self.taken]))
        whole = sum(part.share for part in self.parts)
        for part in self.parts:
            yield from self._part(part, step_s, self.time_s * part.share / whole, generator)

    def _part(self, part: Part, step_s: float, time_s: float, generator: random.Random) -> Iterator[Request]:
        names = (*part.truth, PLACEBO)
        end_s, steps = self.clock() + time_s, part.steps
        if part.layer is not Layer.PATH:
            self.taken.clear()
            for _ in range(2):
                yield Request(frozenset(names), steps, 0, part.layer)
            steps = max(steps_to_cover(segment, step_s) for segment in self.taken)
        self.taken.clear()
        signs: list[list[int]] = []
        while len(signs) < LEAST_PAIRS or self.clock() < end_s:
            group = len(signs) // PAIRS_PER_GROUP % self.groups
            signs.append([generator.choice((-1, 1)) for _ in names])
            for half in (1, -1):
                on = frozenset(name for name, sign in zip(names, signs[-1], strict=True) if sign == half)
                yield Request(on, steps, group, part.layer, len(signs) - 1, (1 - half) // 2)
        found = fit(part, names, signs, self.taken, steps)
        self.found += found
        self.tell(found)

    def on_segment(self, segment: Segment) -> None:
        self.taken.append(segment)


def fit(
    part: Part, names: Sequence[str], signs: Sequence[Sequence[int]], taken: Sequence[Segment], steps: int
) -> list[Found]:
    """Least squares of the pairs' differences on the coins.

    Args:
        signs: `[pairs, names]`, +1: on in the first half.
        taken: two segments for each pair, in order.
    """
    seconds = np.array([segment.seconds for segment in taken]).reshape(-1, 2)
    path = part.layer is Layer.PATH
    scaled = np.log(seconds) if path else 1e3 * seconds
    difference = scaled[:, 0] - scaled[:, 1]
    coins = np.array(signs, float)
    solution, *_ = np.linalg.lstsq(coins, difference, rcond=None)
    left = difference - coins @ solution
    variance = left @ left / max(1, len(left) - len(names))
    errors = np.sqrt(np.diag(np.linalg.pinv(coins.T @ coins)) * variance)
    uncovered = 0 if path else sum(segment.tick_s >= segment.seconds for segment in taken)
    return [
        Found(
            part.name,
            name,
            part.truth.get(name, 0.0),
            slowdown_percent(float(one)) if path else float(one),
            100.0 * float(error) if path else float(error),
            len(signs),
            steps,
            uncovered,
        )
        for name, one, error in zip(names, solution, errors, strict=True)
    ]


def run(
    subject: PairSubject,
    wanted: Sequence[Part],
    time_s: float,
    seed: int = 0,
    tell: Callable[[Sequence[Found]], None] = lambda found: None,
) -> list[Found]:
    """Measure the parts on a subject that has their switches; `tell` gets each when it is done."""
    clock = getattr(subject, "clock_s", time.monotonic)
    session = Session(wanted, subject.groups, time_s, seed, clock, tell)
    try:
        subject.open()
        result = subject.run_pairs(session.requests(), session.on_segment)
    finally:
        subject.close()
    if result.faults:
        raise RuntimeError("; ".join(result.faults))
    return session.found


def table(found: Sequence[Found]) -> str:
    """One line for each switch of each part."""
    rows = [
        (
            one.part,
            one.switch,
            "%" if not one.part or one.part in ("path", "target") else "ms",
            "" if np.isnan(one.truth) else f"{one.truth:.4g}",
            f"{one.estimate:.2f} +- {1.96 * one.error:.2f}",
            one.pairs,
            one.steps,
            one.uncovered,
        )
        for one in found
    ]
    names = ("part", "switch", "unit", "truth", "estimate", "pairs", "steps", "uncovered")
    return tabulate(rows, names, tablefmt="github", disable_numparse=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; exit code 0."""
    from bench.subjects.spin_pairs import SpinPairs, cost_of
    from bench.subjects.trainer.pairs import PairTrainer

    parser = argparse.ArgumentParser("python -m bench.selfcheck.known_costs", description=__doc__)
    parser.add_argument("--subject", choices=("trainer", "spin"), default="trainer")
    parser.add_argument("--config", default="configs/cpu-tiny.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--only", default="", help="parts, with commas between: path, target, tick, ...")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    subject: PairSubject
    if asked.subject == "spin":
        plants: tuple[str, ...] = ()
        subject = SpinPairs({one.name: cost_of(one) for one in INJECTIONS})
    else:
        config = load_config(asked.config, asked.set)
        subject, plants = PairTrainer(config, injections=INJECTIONS, plants=PLANTS), PLANTS
    only = asked.only.split(",") if asked.only else []
    wanted = [part for part in parts(subject.periods, plants) if not only or part.name in only]
    if not wanted:
        parser.error(f"--only {asked.only}: no such part")
    run(subject, wanted, 60.0 * asked.minutes, asked.seed, lambda found: print(table(found), flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
