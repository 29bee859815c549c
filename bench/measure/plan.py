"""Arms, rounds, random order, and how much of it fits into the time: pure functions, no clock and no I/O."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.progress import human_time
from bench.records.types import ALL, OFF, OFF_AGAIN, ONLY, WITHOUT, Arm
from bench.statistics.stopping import MIN_ROUNDS
from steptime.errors import UserError, nearest

MIN_SEGMENT_S = 0.01
"""As a rule a segment is one cycle of batches: a machine's noise is slow, so the sooner both arms have had
their turn, the more of it they share. Measured on two shared cores whose steps spread by 6% with a lag-1
correlation of 0.9: bounds of +-0.3% after a minute of 75 ms segments, of +-1.3% with 0.6 s. Steps of a few
microseconds need a floor, or switching takes all the time."""


def make_arms(collectors: Sequence[str], *, marginal: bool = True, together: bool = False) -> tuple[Arm, ...]:
    """Every arm once: `off`, `only:<c>`, `all`, `without:<c>`, `off-again`.

    `marginal=False` leaves the `without` arms out. With a single collector they would be `off` under another
    name, so they are left out too. `together=True` asks about all collectors as one: `off`, `all`,
    `off-again`, which gives five times the rounds of the full plan in the same time.

    Raises:
        UserError: no collector, or one named twice.
    """
    if not collectors:
        raise UserError("no collector to measure: the plan would be empty")
    if len(set(collectors)) != len(collectors):
        raise UserError(f"a collector is named twice: {', '.join(collectors)}")
    everything = frozenset(collectors)
    if together:
        return (Arm(OFF), Arm(ALL, everything), Arm(OFF_AGAIN))
    arms = [Arm(OFF)]
    arms += [Arm(ONLY + name, frozenset({name})) for name in collectors]
    arms.append(Arm(ALL, everything))
    if marginal and len(collectors) > 1:
        arms += [Arm(WITHOUT + name, everything - {name}) for name in collectors]
    arms.append(Arm(OFF_AGAIN))
    return tuple(arms)


def choose_collectors(available: Sequence[str], only: Sequence[str]) -> tuple[str, ...]:
    """The collectors to measure: all that the subject has, or those of `--only`, in the subject's order.

    Raises:
        UserError: naming an unknown collector and the nearest known one.
    """
    for name in only:
        if name not in available:
            raise UserError(
                f"--only {name}: no such collector{nearest(name, available)}; there are "
                f"{', '.join(available)}"
            )
    return tuple(name for name in available if not only or name in only)


def one_round(arms: Sequence[Arm]) -> tuple[Arm, ...]:
    """The multiset of one round: every arm once, and the shared controls about sqrt(K) times.

    `off` is the control of K contrasts, and so is `all` where the `without` arms exist: Dunnett's allocation
    for both. A plan without those arms is in a hurry, and has every arm once."""
    if not any(arm.name.startswith(WITHOUT) for arm in arms):
        return tuple(arms)
    singles = sum(arm.name.startswith(ONLY) for arm in arms)
    leave_one_out = sum(arm.name.startswith(WITHOUT) for arm in arms)
    repeats = {OFF: max(1, round(math.sqrt(singles))), ALL: max(1, round(math.sqrt(leave_one_out)))}
    return tuple(arm for arm in arms for _ in range(repeats.get(arm.name, 1)))


def rounds(arms: Sequence[Arm], seed: int) -> Iterator[tuple[Arm, ...]]:
    """Endless rounds, each a fresh random permutation of `one_round(arms)`; the same seed gives the same
    orders."""
    generator = random.Random(seed)
    base = list(one_round(arms))
    while True:
        yield tuple(generator.sample(base, len(base)))


@dataclass(frozen=True, slots=True)
class Sizing:
    """What was chosen for the time there is.

    Attributes:
        segments_per_round: positions in a round.
        cycles: whole cycles of batches in each segment.
        steps: measured steps of a segment (`cycles` times the cycle's length).
        washout: steps dropped after each switch.
        rounds: most rounds that the time allows, at least MIN_ROUNDS.
        segment_s, round_s, total_s: expected seconds of a segment's measured part, of a round and of all
            rounds.
        min_time_s: expected seconds of the fewest rounds.
        fits: False when even MIN_ROUNDS of the shortest segments take longer than the time given.
    """

    segments_per_round: int
    cycles: int
    steps: int
    washout: int
    rounds: int
    segment_s: float
    round_s: float
    total_s: float
    min_time_s: float
    fits: bool

    def describe(self, arms: int) -> str:
        """One line for the user, said before measuring begins."""
        dropped = f" after {self.washout} dropped" if self.washout else ""
        line = (
            f"{arms} arms, {self.segments_per_round} segments a round of {self.steps} steps "
            f"({self.segment_s:.2f} s){dropped}; up to {self.rounds} rounds, about {human_time(self.total_s)}"
        )
        return line if self.fits else line + f" (more than asked: {MIN_ROUNDS} rounds are the least)"


def size(
    *,
    step_s: float,
    cycle: int,
    segments_per_round: int,
    time_s: float,
    washout: int,
    min_segment_s: float = MIN_SEGMENT_S,
    min_rounds: int = MIN_ROUNDS,
) -> Sizing:
    """Fit segments of at least `min_segment_s` and at least `min_rounds` rounds into `time_s`.

    Segments are whole cycles, so every segment holds the same set of batches. When both minima do not fit,
    segments get shorter first, down to one cycle; rounds never get fewer than `min_rounds`.

    Raises:
        ValueError: a length or time that is not positive.
    """
    if step_s <= 0 or cycle <= 0 or segments_per_round <= 0 or time_s <= 0 or washout < 0:
        raise ValueError(
            "step_s, cycle, segments_per_round and time_s must be positive, washout not negative"
        )

    def round_s(cycles: int) -> float:
        return segments_per_round * (cycles * cycle + washout) * step_s

    wanted = max(1, math.ceil(min_segment_s / (cycle * step_s) - 1e-9))
    cycles = next((n for n in range(wanted, 1, -1) if min_rounds * round_s(n) <= time_s), 1)
    count = max(min_rounds, int(time_s / round_s(cycles)))
    return Sizing(
        segments_per_round=segments_per_round,
        cycles=cycles,
        steps=cycles * cycle,
        washout=washout,
        rounds=count,
        segment_s=cycles * cycle * step_s,
        round_s=round_s(cycles),
        total_s=count * round_s(cycles),
        min_time_s=min_rounds * round_s(cycles),
        fits=min_rounds * round_s(cycles) <= time_s * 1.001,
    )
