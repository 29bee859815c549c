"""Before the first step: all ranks want the same run, and the others learn from rank 0 where it goes on."""

from __future__ import annotations

from dflash.config import Config, Effect, effects
from dflash.pipeline.build import Inputs
from dflash.pipeline.checkpoint import State
from dflash.pipeline.progress import Progress
from dflash.pipeline.resume import Resumption, fingerprint
from dflash.ranks.world import World


def check_settings(world: World, config: Config) -> None:
    """Refuse settings that change training and are not the same on every rank.

    Raises:
        UserError: naming them, with both values.
    """
    kinds = effects()
    leaves = config.leaves().items()
    world.check_same(
        {key: value for key, value in leaves if kinds[key] is Effect.TRAINING}, "the ranks' settings differ"
    )


def check_samples(world: World, inputs: Inputs) -> None:
    """Refuse other samples than rank 0's: each machine may have a copy of its own.

    Raises:
        UserError: they differ.
    """
    what = {"data.path": fingerprint(inputs.dataset), "samples": len(inputs.dataset.samples)}
    world.check_same(what, "the ranks' samples differ")


def send(world: World, begin: Resumption, over: bool) -> None:
    """Rank 0: how the run begins."""
    state, train = begin.state, begin.config.train
    place = None if state is None else [state.progress.step, state.progress.floor, list(state.progress.ahead)]
    world.board.post("begin", [over, train.accumulation, list(train.legs), place])


def received(world: World, config: Config) -> Resumption | None:
    """A rank over 0: likewise; None when the run is finished already. The weights come later
    (`World.broadcast`).

    Raises:
        RankFailed: rank 0 could not begin.
    """
    over, accumulation, legs, place = world.of_first("begin")
    if over:
        return None
    train = config.train.model_copy(update={"accumulation": accumulation, "legs": tuple(legs)})
    config = config.model_copy(update={"train": train})
    if place is None:
        return Resumption(config)
    step, floor, ahead = place
    return Resumption(config, State(Progress(step, floor, tuple(ahead)), {}, {}))
