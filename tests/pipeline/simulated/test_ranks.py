"""Ranks on simulated devices: sums over a stand-in for NCCL, without a race, a misuse or a wait, and with the
CPU's bits."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from dflash.device import Device
from dflash.observe.syncs.guard import GuardScopes
from steptime.simulate import Simulation
from tests.pipeline.ranked import ranked, run, trainers
from tests.pipeline.simulated.nccl import Group, Ring
from tests.pipeline.simulated.parts import QUICK
from tests.ranks.worlds import worlds
from tests.waiting import HANG_S

pytestmark = pytest.mark.timeout(5 * HANG_S)
RANKS = 2


def layout(drafters: int, kind: str = "sim"):
    """Settings of each rank: a target and so many drafters, every one on a device of its own."""

    def of_rank(rank: int) -> tuple[str, ...]:
        first = rank * (1 + drafters)
        names = [f'"{kind}:{first + place}"' for place in range(1 + drafters)]
        return (f"target.devices=[{names[0]}]", f"drafter.devices=[{', '.join(names[1:])}]")

    return of_rank


def simulated(folder, drafters: int, *settings: str, group=Group):
    """A run on simulated devices in which no worker may wait for its device; the trainers, what each rank's
    run gave, and the simulation."""
    simulation = Simulation()
    with contextlib.ExitStack() as stack:
        stack.enter_context(simulation.open())
        all_of_them = stack.enter_context(worlds(RANKS, drafters))
        for drafter in range(drafters):
            ring = Ring([Device(f"sim:{rank * (1 + drafters) + 1 + drafter}") for rank in range(RANKS)])
            for rank, world in enumerate(all_of_them):
                world.across._polls = False
                world.across._gradients[drafter] = group(ring, rank)
        made = trainers(
            folder,
            all_of_them,
            *QUICK,
            *settings,
            of_rank=layout(drafters),
            scopes=GuardScopes("disallow"),
        )
        results = run(made)
    return made, results, simulation


@pytest.mark.parametrize(
    ("drafters", "settings"),
    [(1, ()), pytest.param(2, ("train.accumulation=2", "train.checkpoint_every=2"), marks=pytest.mark.slow)],
)
def test_two_ranks_give_the_cpus_bits_without_a_fault(tmp_path, drafters, settings):
    made, results, simulation = simulated(tmp_path, drafters, *settings, "name=sim")
    for result in results:
        assert not isinstance(result, Exception), result
    assert simulation.faults == []
    roles = {role for role, _ in simulation.counts.default_stream if "/" in role}
    assert roles == set(), "a worker has used a default stream"
    names = layout(drafters, "cpu")(0)
    plain, expected = ranked(tmp_path, RANKS, *QUICK, *settings, *names, name="plain", drafters=drafters)
    assert [row.loss for row in results[0].scalars] == [row.loss for row in expected[0].scalars]
    for trainer in made:
        master = trainer.replicas[0].flat.master.detach().cpu()
        assert torch.equal(master, plain[0].replicas[0].flat.master)


class Forgets(Group):
    """Nobody waits for the sum."""

    def allreduce(self, tensors):
        super().allreduce(tensors)
        return SimpleNamespace(wait=lambda: None)


@pytest.mark.fault
def test_a_sum_that_nobody_waits_for_is_a_race(tmp_path):
    _, results, simulation = simulated(tmp_path, 1, group=Forgets)
    assert simulation.faults or any(isinstance(result, Exception) for result in results)
    assert "race" in " ".join(map(str, [*simulation.faults, *results])).lower()
