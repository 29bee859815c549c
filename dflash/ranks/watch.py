"""Who of the ranks has failed? A thread of each tells the others that it lives, and hears of their end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash.ranks.board import Board, Mailbox, StoreGone

PERIOD_S = 0.25
FAILED, SUSPECT = "failed", "suspect"
_PATIENCE_S = 3.0


class RankFailed(RuntimeError):
    """Another rank has failed, or is gone; the line names it."""


@dataclass
class _Sign:
    """A rank's last sign of life, by this rank's clock."""

    count: int = -1
    seen_s: float = 0.0


class RankWatch:
    """Runs from the start of a process to its end.

    Rank 0 looks after all ranks, the others after rank 0, which tells them who is gone: so the work does not
    grow with the square of the ranks.

    Args:
        timeout_s: a rank without a sign of life for so long is gone.
        clock_s: seconds, by which time-outs count.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        ranks: int,
        timeout_s: float,
        *,
        period_s: float = PERIOD_S,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board, self._rank, self._timeout_s, self._period_s = board, rank, timeout_s, period_s
        self._now_s = clock_s
        self._others = [other for other in range(ranks) if other != rank] if rank == 0 else [0]
        self._signs = {other: _Sign(seen_s=clock_s()) for other in self._others}
        self._mail = {other: Mailbox(board, other) for other in self._others} if rank == 0 else {}
        self._count = self._rounds = 0
        self._stop = threading.Event()
        self._leaving = False
        self._lost: Callable[[RankFailed], None] = lambda error: None
        self._heard: Callable[[int, str, Any], None] | None = None
        self.failure: RankFailed | None = None
        self._thread = threading.Thread(target=self._run, name="rank watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def report_to(
        self, lost: Callable[[RankFailed], None], heard: Callable[[int, str, Any], None] | None = None
    ) -> None:
        """Call `lost` once from this thread when another rank has failed, also one that has already, and
        `heard` with each message."""
        if heard is not None:
            self._heard = heard
        self._lost = lost
        if self.failure is not None:
            lost(self.failure)

    def tell(self, line: str) -> None:
        """This rank fails. The first rank that says so is the one that all others name."""
        self._leaving = True
        self._board.post_first(FAILED, [self._rank, line])

    def blame(self, what: str) -> RankFailed:
        """Who broke a connection: waits until somebody has said so. From now on a rank is gone that gives no
        sign of life for some periods."""
        with contextlib.suppress(StoreGone):
            self._board.post(SUSPECT, what)
        deadline = self._now_s() + self._timeout_s
        while self.failure is None and self._now_s() < deadline:
            time.sleep(self._period_s / 4)
        return self.failure or RankFailed(f"the connection to another rank broke: {what}")

    def close(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def catch_up(self) -> None:
        """Rank 0: hear every message sent until now; from another thread."""
        seen, deadline = self._rounds, self._now_s() + self._timeout_s
        # The round under way may have passed a mailbox already; the one after it has not.
        while self._rounds < seen + 2 and self._thread.is_alive() and self._now_s() < deadline:
            time.sleep(self._period_s / 8)

    def look(self) -> None:
        """One round: a sign of life, a look at the others, their mail."""
        self._count += 1
        self._board.post(f"alive/{self._rank}", self._count)
        failed = self._board.look(FAILED)
        if failed is not None and failed[0] != self._rank:
            self._lose(RankFailed(f"rank {failed[0]}: {failed[1]}"))
        self._read_mail()
        limit_s, now_s = self._timeout_s, self._now_s()
        if self._board.look(SUSPECT) is not None:
            limit_s = min(limit_s, max(_PATIENCE_S, 8 * self._period_s))
        for other, sign in self._signs.items():
            count = self._board.look(f"alive/{other}")
            if count is not None and count != sign.count:
                sign.count, sign.seen_s = count, now_s
            elif now_s - sign.seen_s > limit_s:
                self._lose(self._gone(other, limit_s))

    def _read_mail(self) -> None:
        """Once somebody listens; until then it keeps."""
        if (heard := self._heard) is None:
            return
        for other, mailbox in self._mail.items():
            while (message := mailbox.take()) is not None:
                heard(other, *message)

    def _run(self) -> None:
        while True:
            try:
                self.look()
            except StoreGone as error:
                self._lose(RankFailed(str(error)))
                return
            self._rounds += 1
            if self._stop.wait(self._period_s):
                return

    def _gone(self, other: int, seconds: float) -> RankFailed:
        line = f"no sign of life for {seconds:g} s: its process was killed, or its machine is gone"
        if self._rank == 0 and not self._leaving:
            self._board.post_first(FAILED, [other, line])
        return RankFailed(f"rank {other}: {line}")

    def _lose(self, error: RankFailed) -> None:
        if self.failure is None:
            self.failure = error
            self._lost(error)
