"""Pairs made by hand: what a subject would give whose noise and costs are known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from steptime.records.pairs import CONTROL, Layer, Pair, Segment
from steptime.statistics.design import Draw, draws

SECONDS_PER = {Layer.PATH: 0.0, Layer.TICK: 1.0, Layer.FLUSH: 10.0}
LENGTHS = {Layer.PATH: 0.27, Layer.TICK: 0.27, Layer.FLUSH: 0.27}
EVEN = dict.fromkeys(Layer, 1 / 3)
TOKENS = 1000
STEP_S = 0.135


def pair_of(
    draw: Draw,
    number: int,
    noise: Sequence[float] | NDArray[np.float64],
    costs: Mapping[str, float],
    process: int = 0,
    interaction: float = 0.0,
    control: tuple[float, float] = (0.0, 0.0),
) -> Pair:
    """`noise`: log units of the two halves. `costs`: by switch, the same share of the time in each layer.
    `interaction`: of the first two switches named in `costs`, when both are on. `control`: what it takes, and
    what it says it takes, log units."""

    def half(on: frozenset[str], extra: float) -> Segment:
        cost = sum(costs.get(name, 0.0) for name in on)
        cost += interaction * (set(list(costs)[:2]) <= on)
        taken, said = control if CONTROL in on else (0.0, 0.0)
        if draw.layer is Layer.PATH:
            seconds = STEP_S * np.exp(extra + cost + taken)
        else:
            seconds = STEP_S * np.exp(extra) + cost * SECONDS_PER[draw.layer]
        lost_s = float(seconds * -np.expm1(-said))
        return Segment(tuple(sorted(on)), 1, TOKENS, float(seconds), control_s=lost_s)

    return Pair(
        number, draw.layer, draw.question, half(draw.first, noise[0]), half(draw.second, noise[1]), process
    )


def pairs_of(
    switches: Sequence[str],
    noise: NDArray[np.float64],
    costs: Mapping[str, float],
    seed: int,
    *,
    layers: Iterable[Layer] = (Layer.PATH,),
    together: float = 0.5,
    interaction: float = 0.0,
    control: tuple[float, float] | None = None,
) -> list[Pair]:
    """As many pairs as `noise` has halves of; each layer gets as many as another. `control` as in `pair_of`;
    None: there is none."""
    lengths = {layer: LENGTHS[layer] for layer in layers}
    halves = noise[: len(noise) // 2 * 2].reshape(-1, 2)
    endless = draws(switches, seed, lengths, shares=EVEN, together=together, control=control is not None)
    return [
        pair_of(draw, i, halves[i], costs, interaction=interaction, control=control or (0.0, 0.0))
        for i, draw in enumerate(islice(endless, len(halves)))
    ]


def autoregressive(rng: np.random.Generator, n: int, rho: float, spread: float) -> NDArray[np.float64]:
    """A stationary series with lag-1 correlation `rho`."""
    series = np.empty(n)
    series[0] = rng.normal()
    for i, shock in enumerate(rng.normal(size=n - 1) * (1 - rho**2) ** 0.5):
        series[i + 1] = rho * series[i] + shock
    return spread * series


NOISES: dict[str, Callable[[np.random.Generator, int], NDArray[np.float64]]] = {
    "white": lambda rng, n: 0.1 * rng.normal(size=n),
    "autocorrelated": lambda rng, n: autoregressive(rng, n, 0.95, 0.1),
    "drift": lambda rng, n: np.linspace(0.0, 0.5, n) + 0.02 * rng.normal(size=n),
    "steps": lambda rng, n: np.repeat(0.2 * rng.normal(size=n // 5 + 1), 5)[:n] + 0.02 * rng.normal(size=n),
    "spikes": lambda rng, n: 0.03 * rng.normal(size=n) + np.where(rng.random(n) < 0.05, 1.0, 0.0),
}
"""Series of log seconds per token, by kind."""
