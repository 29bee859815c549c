"""What the pairs of a run show: an estimate of every collector, of all together and of the placebo. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from steptime.records.costs import Estimate, KnownCost
from steptime.records.pairs import ALL, PLACEBO, Layer, Pair, Question
from steptime.statistics.control import known_cost
from steptime.statistics.design import MIN_PAIRS
from steptime.statistics.effects import REDRAWS, estimates, least_squares
from steptime.statistics.judging import Budgets


@dataclass(frozen=True, slots=True)
class Observations:
    """Attributes:
    collectors: by name; empty when too few pairs, or when only all together was asked.
    all, placebo: None: too few pairs.
    incomplete: which pairs are too few, one line each.
    squares: the cross-check, (percent, standard error) by name, "all" being the sum of the collectors.
    losses_equal: over all pairs; None: some pair has no losses.
    control: None: the run had none.
    """

    collectors: dict[str, Estimate]
    all: Estimate | None
    placebo: Estimate | None
    incomplete: tuple[str, ...]
    squares: dict[str, tuple[float, float]]
    losses_equal: bool | None
    control: KnownCost | None = None


def observe(
    pairs: Sequence[Pair],
    switches: Sequence[str],
    seconds_per: Mapping[Layer, float],
    budgets: Budgets,
    seed: int = 0,
    *,
    only_together: bool = False,
    redraws: int = REDRAWS,
) -> Observations:
    """Estimate everything that a run of `overhead` asks.

    A single switch is all of them, and its pairs answer for both.

    Args:
        switches: the collectors, without the placebo.
        seconds_per: the layers that count, each with the seconds between two of its events (path: anything).
        only_together: no pair was drawn for each.
    """
    single = len(switches) == 1 and not only_together
    questions = [Question.TOGETHER] if only_together else [Question.EACH] if single else list(Question)
    budget = dict.fromkeys((*switches, PLACEBO), budgets.collector_percent) | {ALL: budgets.all_percent}
    found = {
        question: estimates(pairs, question, switches, seconds_per, budget, seed, redraws)
        for question in questions
    }
    if single:
        whole = budget | {switches[0]: budgets.all_percent}
        twin = estimates(pairs, Question.EACH, switches, seconds_per, whole, seed, redraws)
        everything = twin.get(switches[0])
    else:
        everything = found[Question.TOGETHER].get(ALL)
    first = found[questions[0]]
    return Observations(
        collectors={name: first[name] for name in switches if name in first},
        all=everything,
        placebo=first.get(PLACEBO),
        incomplete=tuple(_too_few(pairs, questions, seconds_per)),
        squares=least_squares(pairs, switches, seconds_per),
        losses_equal=_losses_equal(pairs),
        control=known_cost(pairs, switches, seed, redraws),
    )


def _too_few(
    pairs: Sequence[Pair], questions: Sequence[Question], layers: Mapping[Layer, float]
) -> list[str]:
    lines = []
    for layer in layers:
        for question in questions:
            count = sum(pair.layer is layer and pair.question is question for pair in pairs)
            if count < MIN_PAIRS:
                asked = "each collector" if question is Question.EACH else "all together"
                lines.append(
                    f"incomplete: {count} pairs of the layer {layer.value!r} for {asked}, at least "
                    f"{MIN_PAIRS} are needed"
                )
    return lines


def _losses_equal(pairs: Sequence[Pair]) -> bool | None:
    said = {pair.losses_equal for pair in pairs}
    if False in said:
        return False
    return True if said == {True} else None
