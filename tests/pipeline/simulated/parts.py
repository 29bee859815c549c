"""Whole runs on simulated devices, in miniature, beside the same run on the CPU."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash.data.batch import BatchSpec
from dflash.data.plan import Plan
from dflash.observe.syncs.guard import GuardScopes
from dflash.pipeline.trainer import Trainer
from steptime.simulate import Simulation
from tests.pipeline.run import small_trainer
from tests.waiting import HANG_S

QUICK = (
    "data.buckets=[64]",
    "drafter.layers=1",
    "train.steps=4",
    "queue.capacity=2",
    f"train.hang_s={HANG_S}",
)


def devices(targets: int, drafters: int, kind: str = "sim", *, together: bool = False) -> tuple[str, str]:
    """Settings for so many of each, drafters behind the targets, or all on device 0."""
    first = 0 if together else targets

    def names(numbers: range) -> str:
        return ", ".join(f'"{kind}:{0 if together else number}"' for number in numbers)

    return (
        f"target.devices=[{names(range(targets))}]",
        f"drafter.devices=[{names(range(first, first + drafters))}]",
    )


@dataclass
class Ended:
    """What a run left: the losses, and the weights of every drafter."""

    trainer: Trainer
    simulation: Simulation | None
    losses: list[float]
    weights: list[torch.Tensor]

    def order(self) -> list[int]:
        """Plan indices in the order in which an ordered run would draw them: by step, then micro-batch, then
        drafter."""
        drafters = len(self.trainer.replicas)
        found = []
        for row in self.trainer.result.scalars:
            each = len(row.plan_indices) // drafters
            found += [row.plan_indices[d * each + m] for m in range(each) for d in range(drafters)]
        return found


def simulated(
    folder: Path, *settings: str, seed: int | None = None, queries: int = 0, prepare: Any = None, **arguments
) -> Ended:
    """A run in which no worker may wait for its device outside `allowed_sync`.

    Args:
        prepare: called with the trainer before it runs.
    """
    simulation = Simulation(seed=seed, queries=queries)
    with simulation.open():
        scopes = GuardScopes("disallow")
        trainer = small_trainer(folder, *QUICK, *settings, scopes=scopes, **arguments)
        if prepare is not None:
            prepare(trainer)
        return _run(trainer, simulation)


def plain(folder: Path, *settings: str, **arguments) -> Ended:
    """The same on the CPU."""
    return _run(small_trainer(folder, *QUICK, *settings, **arguments), None)


def _run(trainer: Trainer, simulation: Simulation | None) -> Ended:
    try:
        result = trainer.run()
    finally:
        trainer.observer.close()
    weights = [replica.flat.master.detach().cpu() for replica in trainer.replicas]
    return Ended(trainer, simulation, [row.loss for row in result.scalars], weights)


class Replayed:
    """A plan whose batch i is that of another run's i-th draw."""

    def __init__(self, inner: Plan, order: list[int]) -> None:
        self._inner, self._order = inner, order

    def spec(self, i: int) -> BatchSpec:
        index = self._order[i] if i < len(self._order) else i
        return dataclasses.replace(self._inner.spec(index), index=i)


def assert_same(one: Ended, other: Ended) -> None:
    """Bit for bit."""
    assert one.losses == other.losses
    assert len(one.losses) > 0
    for mine, theirs in zip(one.weights, other.weights, strict=True):
        assert torch.equal(mine, theirs)
