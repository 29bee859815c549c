"""What a rank's main thread tells rank 0, and what rank 0 makes of it: steps, places in the plan, rows of the
collectors. No worker waits for any of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from dflash.observe.observer import Observer
from dflash.observe.sinks.base import Row, RowKind, Sink
from dflash.pipeline.progress import FOLD_EVERY, Drawn, Progress, place_left
from dflash.pipeline.rank_share import RankShare, merged
from dflash.pipeline.reports import Reports
from dflash.pipeline.scalars_log import ScalarsLog
from dflash.ranks.board import Post
from dflash.ranks.world import World

SCALARS, PLACE, ROWS = "scalars", "place", "rows"
_PATIENCE_S = 3.0


class RankSink(Sink):
    """The one sink of a rank over 0: its collectors' rows go to rank 0, whose sinks write them."""

    name: ClassVar[str] = "rank 0"
    kinds: frozenset[RowKind] = frozenset({"metrics", "event"})

    def __init__(self, post: Post) -> None:
        self._post = post

    def write(self, rows: list[Row]) -> None:
        self._post.send(ROWS, [[row.kind, row.step, row.values, row.seconds] for row in rows])


class SentReports(Reports):
    """A rank's reports where rank 0 joins them: the drafters' vectors go there as they are."""

    def __init__(self, *arguments: Any, post: Post, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._post = post

    def take(self, *, final: bool = False) -> None:
        rows = [
            [drafter, step, vector.tolist(), list(indices)]
            for drafter, (step, vector, indices) in self._scalars.raw()
        ]
        if rows:
            self._post.send(SCALARS, rows)


class Places:
    """Where each rank stands in the plan, for the checkpoints of a run in mixed order; in plan order that is
    plain arithmetic.

    A rank counts its own batches (`RankShare`). Rank 0 says in the agreement of a step that a checkpoint is
    taken behind it, so that every rank notes its place at that very boundary.

    Args:
        base: where the leg began, in the plan's indices.
        per_step: batches of a rank in one step.
    """

    def __init__(self, world: World, share: RankShare, base: Progress, per_step: int) -> None:
        self._world, self._share, self._base, self._per_step = world, share, base, per_step
        self.logs: list[deque[tuple[int, int]]] = [deque() for _ in range(share.drafters)]
        self._drawn = Drawn(Progress(base.step), self.logs, self._number)
        self._noted: deque[Progress] = deque()
        self._told: dict[int, dict[int, Progress]] = {}
        self._changed = threading.Condition()

    def _number(self, index: int) -> int:
        return self._share.number(place_left(self._base, index))

    # -- drafter 0's thread ----------------------------------------------------------------------------------

    def boundary(self, steps_done: int, save: bool) -> None:
        """Between two steps of a rank over 0."""
        if save:
            self._noted.append(self._drawn.after(steps_done))
        elif steps_done % FOLD_EVERY == 0:
            # Not the newest steps: when a rank fails, the others may end a step apart.
            self._drawn.after(steps_done - 2)

    def own(self, steps_done: int) -> Progress:
        """This rank's place after so many steps, in its own numbers."""
        return self._drawn.after(steps_done)

    # -- the main threads of the other ranks -----------------------------------------------------------------

    def send(self) -> None:
        """Tell rank 0 the places noted since."""
        while self._noted:
            self._send(self._noted.popleft())

    def send_last(self, steps_done: int) -> None:
        """The workers have ended."""
        self.send()
        for step in (steps_done - 1, steps_done):
            if step > self._base.step:
                self._send(self._drawn.after(step))

    def _send(self, place: Progress) -> None:
        self._world.post.send(PLACE, [place.step, place.floor, list(place.ahead)])

    # -- rank 0 ----------------------------------------------------------------------------------------------

    def heard(self, rank: int, place: Sequence[Any]) -> None:
        step, floor, ahead = place
        with self._changed:
            self._told.setdefault(step, {})[rank] = Progress(step, floor, tuple(ahead))
            self._changed.notify_all()

    def merged(self, own: Progress, note: Callable[[str], None]) -> Progress:
        """Where all ranks stand after `own.step` steps; waits for them, not in a worker's thread.

        A rank that has failed may never say. Then it is taken to have drawn in the plan's order: a few
        batches may come twice or not at all, and `note` says so."""
        others = set(range(1, self._share.ranks))
        patience_s = self._world.timeout_s
        with self._changed:
            told = lambda: self._told.get(own.step, {})  # noqa: E731
            while others - told().keys() and patience_s > 0.0:
                self._changed.wait(0.1)
                patience_s -= 0.1
                if self._world.watch.failure is not None or self._world.failing:
                    patience_s = min(patience_s, _PATIENCE_S)
            places = {0: own} | told()
            self._told = {step: known for step, known in self._told.items() if step > own.step}
        if missing := sorted(others - places.keys()):
            steps = own.step - self._base.step
            note(
                f"step {own.step}: rank {', '.join(map(str, missing))} did not say which batches it has "
                "drawn; taken to be the first ones of its share"
            )
            places |= {rank: Progress(own.step, steps * self._per_step) for rank in missing}
        return merged(self._base, places, self._share, own.step)


class FromRanks:
    """Rank 0's ear: takes what the other ranks send to where its own goes. Called by the watch's thread."""

    def __init__(self, scalars: ScalarsLog, observer: Observer, places: Places | None, drafters: int) -> None:
        self._scalars, self._observer, self._places, self._drafters = scalars, observer, places, drafters

    def __call__(self, rank: int, kind: str, value: Any) -> None:
        if kind == SCALARS:
            for drafter, step, vector, indices in value:
                row = (step, np.asarray(vector, np.float32), tuple(indices))
                self._scalars.arrived(rank * self._drafters + drafter, [row])
        elif kind == PLACE and self._places is not None:
            self._places.heard(rank, value)
        elif kind == ROWS:
            for kind_of_row, step, values, seconds in value:
                self._observer.from_rank(rank, kind_of_row, step, values, seconds)
