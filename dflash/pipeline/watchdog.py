"""Who has hung? A thread that looks at what the workers publish anyway, and at where they stand; it costs
them nothing."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import TYPE_CHECKING

from dflash.data.prefetch import BatchPrefetcher
from dflash.pipeline.exchange import GradientExchange
from dflash.pipeline.hidden_queue import BufferPool, SharedHiddenStateQueue
from dflash.ranks.across import Across
from dflash.ranks.watch import RankWatch

if TYPE_CHECKING:
    from dflash.observe.recorder import WorkerRecorder
    from dflash.pipeline.drafter_worker import DrafterWorker

LOOKS = 10
"""Looks within `train.hang_s`. A process that was stopped meanwhile has had no looks, and has not hung."""

WAITS: frozenset[CodeType] = frozenset(
    function.__code__
    for function in (
        BatchPrefetcher.get,
        BatchPrefetcher._build,
        SharedHiddenStateQueue.get,
        SharedHiddenStateQueue.put,
        BufferPool.take,
        GradientExchange._meet,
        Across._finish,
        RankWatch.blame,
    )
)
"""Where a worker waits for another one."""
ELSEWHERE: frozenset[CodeType] = frozenset({Across._finish.__code__, RankWatch.blame.__code__})
"""Where it waits for another rank, whose own watchdog knows why."""


class WorkerHung(RuntimeError):
    """A worker has stood in one place for too long; the line names it, and `stack` is where it stands."""

    def __init__(self, text: str, role: str, stack: str) -> None:
        super().__init__(text)
        self.role, self.stack = role, stack


@dataclass(frozen=True)
class Watched:
    """A thread to look at.

    Attributes:
        unit: what `count` counts, for the message: "step", "batch".
        count: what it has in hand.
        moves: a further number that changes when it moves.
    """

    role: str
    thread: threading.Thread
    unit: str
    count: int
    moves: int = 0


def watched(
    threads: Mapping[str, threading.Thread],
    prefetcher: BatchPrefetcher,
    targets: Sequence[WorkerRecorder],
    drafters: Sequence[DrafterWorker],
    moves: int,
) -> list[Watched]:
    """All workers of a run now.

    Args:
        threads: by role.
        moves: changes when a drafter moves within a step.
    """
    found = [Watched("prefetcher", prefetcher.thread, "batch", prefetcher.built)]
    found += [Watched(one.label, threads[one.label], "batch", one.step) for one in targets]
    for drafter in drafters:
        role = f"drafter/{drafter.index}"
        found.append(Watched(role, threads[role], "step", drafter.step_index, moves))
    return found


@dataclass(frozen=True)
class View:
    """One look at one worker.

    Attributes:
        place: equal in two looks when it has not moved.
        waits: it waits for another worker.
        elsewhere: it waits for another rank.
    """

    role: str
    place: Hashable
    waits: bool
    at: str = ""
    stack: str = ""
    elsewhere: bool = False


class Watch:
    """Counts the looks in which a worker stood still; pure, no clock.

    Args:
        looks: so many, one after the other, are a hang.
    """

    def __init__(self, looks: int = LOOKS) -> None:
        self._looks = looks
        self._places: dict[str, Hashable] = {}
        self._still: dict[str, int] = {}
        self._all_waited = 0

    def look(self, views: Sequence[View]) -> View | None:
        """The worker that has hung, or one of them when all wait for each other; None: the run moves."""
        moved = not views or any(self._places.get(view.role) != view.place for view in views)
        stuck = all(view.waits for view in views) and not any(view.elsewhere for view in views)
        self._all_waited = self._all_waited + 1 if stuck and not moved else 0
        for view in views:
            still = not view.waits and self._places.get(view.role) == view.place
            self._still[view.role] = self._still.get(view.role, 0) + 1 if still else 0
            self._places[view.role] = view.place
        hung = [view for view in views if self._still[view.role] >= self._looks]
        if hung:
            return hung[0]
        return views[0] if self._all_waited >= self._looks else None


def view(watched: Watched, frame: FrameType | None) -> View:
    """Look at one worker now."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    ours = [one for one in frames if one.f_code.co_filename != threading.__file__]
    inner = ours[0] if ours else None
    place = (
        watched.count,
        watched.moves,
        tuple((id(one.f_code), one.f_lasti) for one in frames),
    )
    at = f"{inner.f_code.co_filename}:{inner.f_lineno} {inner.f_code.co_name}" if inner is not None else ""
    return View(
        watched.role,
        place,
        inner is not None and inner.f_code in WAITS,
        f"{watched.unit} {watched.count}; it stands at {at}",
        "".join(traceback.format_stack(frames[0])) if frames else "",
        inner is not None and inner.f_code in ELSEWHERE,
    )


class Watchdog:
    """Looks at the workers until it is stopped.

    Args:
        hang_s: a worker that stands still for so long has hung.
        watched: whom to look at, now.
        hung: called once, from its thread.
    """

    def __init__(
        self, hang_s: float, watched: Callable[[], Sequence[Watched]], hung: Callable[[WorkerHung], None]
    ) -> None:
        self._hang_s, self._watched, self._hung = hang_s, watched, hung
        self._watch = Watch(LOOKS)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End it; it may be in the middle of a look."""
        self._stop.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._hang_s / (LOOKS + 2)):
            if (error := self.look()) is not None:
                self._hung(error)
                return

    def look(self) -> WorkerHung | None:
        """One look at all of them."""
        frames = sys._current_frames()
        living = [one for one in self._watched() if one.thread.is_alive()]
        found = self._watch.look([view(one, frames.get(one.thread.ident or 0)) for one in living])
        if found is None:
            return None
        word = "all workers wait for each other, first" if found.waits else "hung:"
        text = f"{word} {found.role} has not moved for {self._hang_s:g} s; {found.at}"
        return WorkerHung(text, found.role, found.stack)
