"""Which pair is measured next: its layer, its question, and the switches that are on in its first half. Pure.

In a pair that is drawn for each switch, a fair coin per switch, the placebo's too, says in which half it is
on. So each pair tells something about every switch, and whatever a pair's noise is, it falls on either side
of a switch by that coin alone. The order inside a pair is random by the same coins. In a pair that is drawn
for all together, one coin says which half has them all and the placebo has a coin of its own.

The control is on in the path's pairs for each alone: what is said of all together, and the throughput with
all off, never see it. Its coins are of a stream of their own, so all else is drawn as without it.

Coins serve however few pairs there are. Hadamard blocks would balance the switches exactly, but only a coin
per block and switch would be left to chance, so nothing could be said at 5% below five blocks (40 pairs of
seven switches), where eight pairs with coins can."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from steptime.records.pairs import CONTROL, PLACEBO, Layer, Question

TOGETHER: Final = 0.5
"""Share of the pairs that are drawn for all together. The verdict of a run is about all of them, and a half
gives all and each single switch the same standard error."""
SHARES: Final[Mapping[Layer, float]] = {Layer.PATH: 13 / 16, Layer.TICK: 1 / 8, Layer.FLUSH: 1 / 16}
"""Share of the time of each layer where nothing is known of the lengths. A forced tick comes out magnified by
the time between ticks over the length of a segment, so it needs few pairs for the same error; a flush even
fewer."""
MIN_PAIRS: Final = 8
"""Pairs of each layer and question below which nothing is said. Of eight pairs the smallest p is 2^-8, which
can name one of a dozen switches."""
SPARE: Final = 1.25
"""So much more than the fewest pairs is planned for: a run ends up to half a block before its time, and a
pilot may take a pair to be shorter than it is."""

_STREAM: Final = 0xC0

FIRST_PART: Final = 0.25
"""Part of a run in which the fewest pairs of each layer are taken, where they fill no more than this share of
it."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A pair to take: the switches that are on in its first half and in its second."""

    layer: Layer
    question: Question
    first: frozenset[str]
    second: frozenset[str]


def best_shares(lengths_s: Mapping[Layer, float], seconds_per: Mapping[Layer, float]) -> dict[Layer, float]:
    """Shares of the time that make the error of a total cost smallest, where all segments spread by the same
    share of their length: in proportion to a pair's spread, as a share of the throughput, times the root of
    its length (Neyman's allocation).

    Args:
        lengths_s: seconds that a pair of each layer takes.
        seconds_per: seconds between two events of each layer (path: anything).
    """
    spread = {
        layer: 1.0 if layer is Layer.PATH else length / 2 / seconds_per[layer]
        for layer, length in lengths_s.items()
    }
    weights = {layer: spread[layer] * lengths_s[layer] ** 0.5 for layer in lengths_s}
    return {layer: weight / sum(weights.values()) for layer, weight in weights.items()}


def shares_for(
    lengths_s: Mapping[Layer, float],
    time_s: float,
    together: float = TOGETHER,
    shares: Mapping[Layer, float] = SHARES,
) -> dict[Layer, float]:
    """Share of the time of each layer of `lengths_s`, so that each gets its fewest pairs in a short run too.

    Args:
        lengths_s: seconds that a pair of each layer takes, both halves with what lies between.
        time_s: seconds there are for pairs.
        together: share of the pairs drawn for all together.
        shares: wanted, where there is time enough.
    """
    total = sum(shares[layer] for layer in lengths_s)
    rarest = min(share for share in (together, 1.0 - together) if share > 0)
    least = {layer: SPARE * MIN_PAIRS / rarest * length / time_s for layer, length in lengths_s.items()}
    wanted = {layer: max(shares[layer] / total, least[layer]) for layer in lengths_s}
    # What the short layers need beyond their share is taken from the path, down to its own least.
    path = wanted.get(Layer.PATH)
    if path is not None:
        rest = 1.0 - sum(share for layer, share in wanted.items() if layer is not Layer.PATH)
        wanted[Layer.PATH] = max(least[Layer.PATH], min(path, rest))
    whole = sum(wanted.values())
    return {layer: share / whole for layer, share in wanted.items()}


def least_time_s(lengths_s: Mapping[Layer, float], together: float = TOGETHER) -> float:
    """Seconds that the fewest pairs of every layer and question take; `lengths_s` as in `shares_for`."""
    rarest = min(share for share in (together, 1.0 - together) if share > 0)
    return sum(lengths_s.values()) * np.ceil(MIN_PAIRS / rarest)


def first_part_s(lengths_s: Mapping[Layer, float], time_s: float, together: float = TOGETHER) -> float:
    """Seconds of a run in which the fewest pairs of each layer should be there: only then may it end early.

    Args:
        time_s: of the whole run.
    """
    return min(time_s, max(FIRST_PART * time_s, least_time_s(lengths_s, together) / FIRST_PART))


def draws(
    switches: Sequence[str],
    seed: int,
    lengths_s: Mapping[Layer, float],
    *,
    shares: Mapping[Layer, float] = SHARES,
    together: float = TOGETHER,
    placebo: bool = True,
    control: bool = False,
) -> Iterator[Draw]:
    """Endless pairs; the same arguments give the same ones.

    A layer's turn comes when it has had less of its share of the time than the others, and in each layer the
    questions take turns by `together`. None of that is left to chance, as it need not be: the coins are.

    Args:
        switches: what is judged, without the placebo.
        lengths_s: seconds that a pair of each layer takes; only the layers named are drawn. Read at every
            pair, so what has been learnt about the lengths since may be put into it.
        shares: share of the time of each layer.
        together: share of the pairs drawn for all together, in [0, 1]. A single switch is all of them, and
            its pairs are all drawn for each.
        control: with the control.

    Raises:
        ValueError: no switch, one named twice or like the placebo (or the control), no layer, or `together`
            outside [0, 1].
    """
    columns = (*switches, *((PLACEBO,) if placebo else ()))
    if not switches or len(set(columns)) != len(columns):
        raise ValueError(f"switches must be named once each, and not {PLACEBO!r}: {', '.join(switches)}")
    if not lengths_s or not 0.0 <= together <= 1.0:
        raise ValueError("at least one layer is needed, and a share of pairs for all together in [0, 1]")
    share_together = together if len(switches) > 1 else 0.0
    if control and CONTROL in switches:
        raise ValueError(f"no switch may be named {CONTROL!r} beside the control")
    generator, of_control = np.random.default_rng(seed), np.random.default_rng([seed, _STREAM])
    spent = dict.fromkeys(lengths_s, 0.0)
    taken = dict.fromkeys(lengths_s, 0)
    while True:
        layer = min(spent, key=lambda one: spent[one] / shares[one])
        spent[layer] += lengths_s[layer]
        count = taken[layer] = taken[layer] + 1
        coins = generator.integers(0, 2, size=len(columns)).astype(bool)
        if int(count * share_together) > int((count - 1) * share_together):
            question = Question.TOGETHER
            coins[: len(switches)] = coins[0]
        else:
            question = Question.EACH
        first = frozenset(name for name, heads in zip(columns, coins, strict=True) if heads)
        second = frozenset(columns) - first
        if control and layer is Layer.PATH and question is Question.EACH:
            if of_control.integers(0, 2):
                first |= {CONTROL}
            else:
                second |= {CONTROL}
        yield Draw(layer, question, first, second)
