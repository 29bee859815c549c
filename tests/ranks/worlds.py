"""Several ranks in one process: real gloo groups over a store in memory, a thread for each rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from dflash.ranks.across import Across
from dflash.ranks.board import Board
from dflash.ranks.watch import RankWatch
from dflash.ranks.world import World
from steptime import simulate
from tests.clock import Clock
from tests.waiting import HANG_S, wait_until

PERIOD_S = 0.01
TIMEOUT_S = 60.0
_STILL = Clock()


def move_on(clock: Clock, watches: Sequence[RankWatch], until: Callable[[], object]) -> None:
    """Time goes on by a second when each of these watches has looked again, so that who lives has shown it,
    until it is so."""
    while not until():
        clock.advance(1.0)
        wait_until(partial(_looked, [(watch, watch._rounds + 3) for watch in watches], until))


def _looked(wanted: Sequence[tuple[RankWatch, int]], until: Callable[[], object]) -> object:
    return all(watch._rounds >= rounds for watch, rounds in wanted) or until()


def on_each(ranks: int, body: Callable[[int], Any]) -> list[Any]:
    """What `body` returns, or raises, on each rank, all at the same time."""

    simulation = simulate.current()

    def caught(rank: int) -> Any:
        try:
            with contextlib.nullcontext() if simulation is None else simulate.entered(simulation):
                return body(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(caught, range(ranks), timeout=2 * HANG_S))


@contextlib.contextmanager
def worlds(
    ranks: int, drafters: int = 1, clock_s: Callable[[], float] = _STILL.seconds
) -> Iterator[list[World]]:
    """The ranks of one run, their watches running; left at the end. Time stands still for the watches unless
    the test moves `clock_s`."""
    store = dist.HashStore()

    def made(rank: int) -> World:
        def group(name: str) -> dist.ProcessGroupGloo:
            return dist.ProcessGroupGloo(
                dist.PrefixStore(name, store), rank, ranks, timedelta(seconds=HANG_S)
            )

        board = Board(dist.PrefixStore("board", store))
        watch = RankWatch(board, rank, ranks, TIMEOUT_S, period_s=PERIOD_S, clock_s=clock_s)
        across = Across(
            rank,
            ranks,
            group("host"),
            [group(f"gradients {drafter}") for drafter in range(drafters)],
            polls=True,
            blame=watch.blame,
        )
        watch.start()
        return World(rank, ranks, board, across, watch, HANG_S)

    def leave(rank: int) -> None:
        """A group with a collective that nobody came to ends when the others' groups do, or after its whole
        timeout: so all end together."""
        across = found[rank].across
        across._host, across._gradients = None, []

    found = on_each(ranks, made)
    try:
        yield found
    finally:
        for world in found:
            world.watch.close()
        on_each(ranks, leave)
