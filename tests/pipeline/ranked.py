"""Several ranks of one run, a trainer in a thread for each, with real gloo groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash.observe.observer import Observer
from dflash.observe.roles import RoleMap
from dflash.pipeline.build import prepare_inputs
from dflash.pipeline.rank_begin import check_samples, check_settings, received, send
from dflash.pipeline.rank_mail import RankSink
from dflash.pipeline.resume import find
from dflash.pipeline.trainer import Trainer, TrainResult
from dflash.ranks.world import World
from tests.pipeline.run import small_config
from tests.ranks.worlds import on_each, worlds


def trainers(
    folder: Path,
    all_of_them: Sequence[World],
    *settings: str,
    name: str = "run",
    of_rank: Callable[[int], tuple[str, ...]] = lambda rank: (),
    **arguments: Any,
) -> list[Trainer]:
    """A trainer for each rank, as `dflash train` makes them; rank 0 has the folder.

    Args:
        of_rank: more settings of a rank.
    """
    # The cache of the data is written once.
    prepare_inputs(small_config(folder, *settings), skip_devices=True)
    run_dir = folder / name

    def made(rank: int) -> Trainer:
        world, config = all_of_them[rank], small_config(folder, *settings, *of_rank(rank))
        check_settings(world, config)
        if world.first:
            begin = find(run_dir, config, world.ranks)
            send(world, begin, False)
        else:
            begin = received(world, config)
        inputs = prepare_inputs(begin.config)
        check_samples(world, inputs)
        observer = Observer(
            config.observe,
            run_dir,
            RoleMap.from_config(config, ranks=world.ranks),
            sinks=None if world.first else [RankSink(world.post)],
        )
        return Trainer(inputs, run_dir, observer, resume=begin.state, world=world, **arguments)

    found = on_each(len(all_of_them), made)
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found


def run(trainers: list[Trainer]) -> list[object]:
    """Every rank's result, or what it raised."""

    def body(rank: int) -> TrainResult:
        trainer = trainers[rank]
        world = trainer.part._world
        try:
            return trainer.run()
        finally:
            if not world.first:
                trainer.observer.close()
            world.leave()
            if world.first:
                trainer.observer.close()

    return on_each(len(trainers), body)


def ranked(
    folder: Path, ranks: int, *settings: str, name: str = "run", drafters: int = 1, **arguments: Any
) -> tuple[list[Trainer], list[TrainResult]]:
    """One run to its end: the trainers and their results."""
    with worlds(ranks, drafters) as all_of_them:
        made = trainers(folder, all_of_them, *settings, name=name, **arguments)
        results = run(made)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return made, results
