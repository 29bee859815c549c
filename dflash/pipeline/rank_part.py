"""This process's part in a run: alone, or as one of several ranks. The trainer asks it and knows no rank."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dflash.config import Config
from dflash.data.plan import Plan
from dflash.observe.observer import Observer
from dflash.pipeline.drafter_worker import DrafterWorker, Replica
from dflash.pipeline.exchange import GradientExchange
from dflash.pipeline.progress import Progress, RemainingPlan
from dflash.pipeline.rank_mail import FromRanks, Places, SentReports
from dflash.pipeline.rank_share import RankPlan, RankShare
from dflash.pipeline.reports import Reports
from dflash.pipeline.saver import device_buffers
from dflash.pipeline.scalars_log import ScalarsLog
from dflash.pipeline.supervisor import Failure, Supervisor
from dflash.ranks.board import StoreGone
from dflash.ranks.world import World


class Alone:
    """The whole run is in this process.

    Attributes:
        first: it owns the run's folder, restores and saves.
        share: which batches of the plan are its own.
        places: where the ranks of a mixed run stand; None for an ordered one, and for one rank.
    """

    first = True
    ranks = 1
    places: Places | None = None

    def __init__(self, config: Config) -> None:
        self._config, self._drafters = config, len(config.drafter.devices)
        self.share = RankShare(drafters=self._drafters)

    def plan(self, plan: Plan, base: Progress) -> Plan:
        """What is left of this process's batches."""
        return RemainingPlan(plan, base)

    def exchange(self) -> GradientExchange:
        return GradientExchange(self._drafters)

    def scalars(self) -> ScalarsLog:
        return ScalarsLog(self._drafters, self._config.drafter.block_size)

    def reports(self, *arguments: Any, **named: Any) -> Reports:
        return Reports(*arguments, **named)

    def equal_weights(self, replicas: Sequence[Replica]) -> None:
        """Every rank begins with rank 0's weights and moments; collective, before the workers start."""

    def logs(self, own: list[deque[tuple[int, int]]] | None) -> list[deque[tuple[int, int]]] | None:
        """What the drafters append their draws to, given what the checkpoints of this process ask for."""
        return own

    def boundary(self, steps_done: int, save: bool) -> None:
        """Between two steps of drafter 0 of a process that saves nothing."""

    def listen(self, scalars: ScalarsLog, observer: Observer, supervisor: Supervisor) -> None:
        """From now on the other ranks' failures end this one, and rank 0 takes what they tell."""

    def look_after(self) -> None:
        """Ten times a second in the main thread."""

    def fail(self, failure: Failure | None) -> None:
        """Tell the others, from any thread."""

    def end(self, reports: Reports, worker: DrafterWorker) -> None:
        """The workers have ended: the last rows and places are exchanged."""


class Among(Alone):
    """One rank of several."""

    def __init__(self, config: Config, world: World, base: Progress) -> None:
        super().__init__(config)
        self._world, self.first, self.ranks = world, world.first, world.ranks
        self.share = RankShare(world.rank, world.ranks, self._drafters)
        if not config.queue.ordered:
            self.places = Places(world, self.share, base, config.train.accumulation * self._drafters)

    def plan(self, plan: Plan, base: Progress) -> Plan:
        return RankPlan(RemainingPlan(plan, base), self.share)

    def exchange(self) -> GradientExchange:
        return GradientExchange(self._drafters, self._world.across)

    def scalars(self) -> ScalarsLog:
        drafters = self._drafters * (self.ranks if self.first else 1)
        return ScalarsLog(drafters, self._config.drafter.block_size)

    def reports(self, *arguments: Any, **named: Any) -> Reports:
        if self.first:
            return Reports(*arguments, **named)
        return SentReports(*arguments, post=self._world.post, **named)

    def equal_weights(self, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            with replica.device.active():
                self._world.broadcast(replica.index, device_buffers(replica.optimizer))
                replica.flat.refresh_working()

    def logs(self, own: list[deque[tuple[int, int]]] | None) -> list[deque[tuple[int, int]]] | None:
        return own if self.places is None else self.places.logs

    def boundary(self, steps_done: int, save: bool) -> None:
        if self.places is not None:
            self.places.boundary(steps_done, save)

    def listen(self, scalars: ScalarsLog, observer: Observer, supervisor: Supervisor) -> None:
        heard: Callable[[int, str, Any], None] | None = None
        if self.first:
            heard = FromRanks(scalars, observer, self.places, self._drafters)
        self._world.watch.report_to(partial(supervisor.fail, "another rank"), heard)

    def look_after(self) -> None:
        if self.places is not None and not self.first:
            self.places.send()

    def fail(self, failure: Failure | None) -> None:
        if failure is not None:
            self._world.fail(failure.line())

    def end(self, reports: Reports, worker: DrafterWorker) -> None:
        if self.first:
            self._world.others_done()
            return
        with contextlib.suppress(StoreGone):
            reports.take(final=True)
            if self.places is not None:
                self.places.send_last(worker.step_index)
            self._world.done()
