"""Exact counts of a loop: one cycle of batches with each set of switches on, in a process of its own."""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from steptime.counting.count import SyncCount, count_syncs
from steptime.counting.cuda import category, is_sync
from steptime.counting.difference import Counts, difference
from steptime.counting.run_script import INTERRUPTED
from steptime.errors import UserError
from steptime.records.types import ALL, OFF, CountedPlace, ExactCounts
from steptime.subjects.steps.hold import reset_random, weights_held
from steptime.subjects.steps.loop import Loop, Switches
from steptime.syncs.scopes import ALLOCATION, COPY_TO_DEVICE, COPY_TO_HOST, OPERATION

WARM_CYCLES = 3
"""Cycles before the first one that is counted."""


class _Hands(Protocol):
    """Hands a loop its batches, and ends it."""

    def batch(self) -> int: ...

    def boundary(self, loss: Any) -> bool: ...


class _Arms:
    """Hands of the counted loop: a warm-up cycle of each arm, then the cycle that is counted."""

    def __init__(self, loop: Loop, arms: Mapping[str, Sequence[str]], counted: SyncCount) -> None:
        self._cycle, self._counted = loop.cycle, counted
        self._left = [(name, frozenset(on) & frozenset(loop.switches)) for name, on in arms.items()]
        self._thrown = Switches(loop)
        self._done = (1 - WARM_CYCLES) * loop.cycle  # an arm adds a cycle of its own
        self._before: Counts = {}
        self._hold = loop.hold
        self.counts: dict[str, Counts] = {}
        self._thrown.set(frozenset(loop.switches))

    def batch(self) -> int:
        return _of_cycle(self._done, self._cycle, self._hold)

    def boundary(self, loss: Any) -> bool:
        self._done += 1
        if self._done == 0:
            self._thrown.set(self._left[0][1])
        elif self._done == self._cycle:
            self._before = self._read()
            self._thrown.act(self._left[0][1])
        elif self._done == 2 * self._cycle:
            name, _ = self._left.pop(0)
            self.counts[name] = dict(Counter(self._read()) - Counter(self._before))
            self._done = 0
            if self._left:
                self._thrown.set(self._left[0][1])
        return bool(self._left)

    def _read(self) -> Counts:
        return self._counted.counts


class _Steps:
    """Hands of a loop whose steps are counted one by one, with everything on. What acts every so many steps
    does so once, in the first counted step."""

    def __init__(self, loop: Loop, steps: int, counted: SyncCount) -> None:
        self._cycle, self._hold, self._counted = loop.cycle, loop.hold, counted
        self._last = counted.warmup + steps
        self._on = frozenset(loop.switches)
        self._thrown = Switches(loop)
        self._thrown.set(self._on)

    def batch(self) -> int:
        return _of_cycle(self._counted.finished, self._cycle, self._hold)

    def boundary(self, loss: Any) -> bool:
        self._counted.step()
        if self._counted.finished == self._counted.warmup:
            self._thrown.act(self._on)
        return self._counted.finished < self._last


def _of_cycle(done: int, cycle: int, hold: bool) -> int:
    group = done % cycle
    if hold:
        reset_random(group)
    return group


def _drive(loop: Loop, hands: _Hands) -> None:
    with weights_held() if loop.hold else contextlib.nullcontext():
        loop.run(hands.batch, hands.boundary)
    if loop.close is not None:
        loop.close()


def count_steps(
    make: Callable[[], Loop],
    *,
    device: str | None = "cuda",
    warmup: int = 0,
    steps: int | None = None,
    work: bool = False,
) -> tuple[int, SyncCount]:
    """Count a loop by steps, with everything on; the exit code, and what was counted. An error of a step is
    printed and gives code 1, Ctrl-C gives 130; what was counted before it stands.

    Args:
        make: the loop; made inside, so that its threads are counted too.
        warmup: steps to leave out, at least `WARM_CYCLES` cycles.
        steps: to count; None: a cycle.

    Raises:
        UserError: the loop cannot be made, or asks for what cannot be simulated.
    """
    code = 0
    with count_syncs(device=device, work=work, by_steps=False) as counted:
        loop = make()
        counted.warmup = max(warmup, loop.warmup, WARM_CYCLES * loop.cycle)
        try:
            _drive(loop, _Steps(loop, steps or loop.cycle, counted))
        except UserError:
            raise
        except KeyboardInterrupt:
            code = INTERRUPTED
        except Exception:
            traceback.print_exc()
            code = 1
    return code, counted


def count(
    make: Callable[[], Loop], arms: Mapping[str, Sequence[str]], everything: bool
) -> dict[str, ExactCounts]:
    """Count each arm, on simulated CUDA where there is no GPU.

    Args:
        make: the loop; made inside, so that its threads are counted too.
        arms: name -> switches that are on.
        everything: the arm `all` means all that this loop has.
    """
    with count_syncs(device="cuda", work=True, by_steps=False) as counted:
        loop = make()
        wanted = {
            name: list(loop.switches) if everything and name == ALL else on for name, on in arms.items()
        }
        hands = _Arms(loop, wanted, counted)
        _drive(loop, hands)
    return exact(hands.counts, loop.cycle)


def exact(counts: Mapping[str, Counts], steps: int) -> dict[str, ExactCounts]:
    """In the harness's words. Places are every sync, and what differs from `off` in some arm."""
    rows = [row for arm in counts.values() for row in difference(counts.get(OFF, {}), arm)]
    changed = {(row.role, row.kind, row.place) for row in rows}

    def summed(found: Counts, *kinds: str) -> int:
        return sum(n for (_, kind, _), n in found.items() if kind in kinds)

    return {
        arm: ExactCounts(
            arm=arm,
            steps=steps,
            armed=True,
            syncs=sum(n for (_, kind, _), n in found.items() if is_sync(kind)),
            operations=summed(found, OPERATION),
            copies=summed(found, COPY_TO_DEVICE, COPY_TO_HOST),
            allocations=summed(found, ALLOCATION),
            places=tuple(
                CountedPlace(category(kind), role, f"{place} ({kind})", n, steps)
                for (role, kind, place), n in sorted(found.items(), key=str)
                if is_sync(kind) or (role, kind, place) in changed
            ),
            ways=("dispatch",),
        )
        for arm, found in counts.items()
    }
