"""Count the host syncs of any PyTorch program.

    with count_syncs(warmup=3) as syncs:
        train()
    print(syncs.table())

Steps are those of the program's optimizers (`Optimizer.step`), or the calls of `syncs.step()`. On CUDA
tensors say themselves where they are. On the CPU everything is taken to be on a device, except what came from
numpy or Python values and what `.cpu()` returned; so `.to("cpu")` of a tensor that is there already counts
for nothing. A program that names its device `cpu:0` is counted strictly: plain `cpu` is then the host."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from steptime.counting.difference import Counts, counts_table
from steptime.simulate.program.cuda import barrier, simulated_cuda
from steptime.simulate.program.loaders import host_loaders
from steptime.simulate.program.memory import ProgramBoundary
from steptime.syncs.boundary import Boundary
from steptime.syncs.counting import summed, watched
from steptime.syncs.scopes import GRAPH, OPERATION, WORK, Ledger, Place, Scope

MAIN = "main"


class SyncCount:
    """What was counted so far.

    Attributes:
        warmup: steps that are not counted.
        finished: steps ended, warm-up included.
    """

    def __init__(self, ledger: Ledger, warmup: int, program: ProgramBoundary | None = None) -> None:
        self._ledger, self.warmup, self._program = ledger, warmup, program
        self.finished = 0
        self.scopes: list[Scope] = []

    def step(self) -> None:
        """A step of the program has ended."""
        self.finished += 1
        for scope in self.scopes:
            scope.mark_step(self.finished)

    @property
    def device_unused(self) -> bool:
        """CUDA was simulated, and the program put nothing there: its CPU was taken for the device."""
        return self._program is not None and not self._program.placed

    @property
    def simulated(self) -> bool:
        return self._program is not None

    @property
    def steps(self) -> int:
        """Counted steps; 0: the program marked none."""
        return max(0, self.finished - self.warmup)

    @property
    def counts(self) -> Counts:
        """(role, kind, place) -> number in whole steps behind the warm-up; of everything when the program
        marked no step, since a program need not have an optimizer."""
        counts = self._ledger.counts.copy()
        if not self.finished:
            return summed(counts)
        return summed({key: n for key, n in counts.items() if self.warmup <= key.step < self.finished})

    def spread(self) -> dict[tuple[str, str, Place], tuple[int, int]]:
        """Of each role, kind and place: in how many counted steps it was, and how often in one at most."""
        by_step: dict[tuple[str, str, Place], dict[int, int]] = {}
        for key, n in self._ledger.counts.copy().items():
            if not self.finished or self.warmup <= key.step < self.finished:
                found = by_step.setdefault((key.role, key.kind, key.place), {})
                found[key.step] = found.get(key.step, 0) + n
        return {name: (len(found), max(found.values())) for name, found in by_step.items()}

    def asked_by(self, role: str, kind: str, place: Place) -> Place:
        """The innermost frame of the user's own tree, the most frequent one."""
        askers = (self._ledger.asked or {}).get((role, kind, place))
        return max(askers, key=lambda one: askers[one]) if askers else place

    @property
    def total(self) -> int:
        """Host syncs."""
        return sum(n for (_, kind, _), n in self.counts.items() if kind not in WORK)

    def work(self, kind: str) -> int:
        """Sum of one kind of device work, e.g. "operation"."""
        return sum(n for (_, found, _), n in self.counts.items() if found == kind)

    @property
    def graphs(self) -> int:
        """Compiled graphs that ran, backward ones too; known when device work is counted."""
        return sum(
            n
            for (_, kind, place), n in self.counts.items()
            if kind == OPERATION and place.function.startswith(GRAPH)
        )

    def table(self, tablefmt: str = "simple", *, work: bool = False) -> str:
        """Role, kind, file:line, function and how many, for each step where steps are known."""
        return counts_table(self.counts, self.steps, tablefmt, work=work)


@contextlib.contextmanager
def count_syncs(
    *,
    device: str | None = None,
    warmup: int = 0,
    role: str = MAIN,
    work: bool = False,
    steps: int | None = None,
    by_steps: bool = True,
) -> Iterator[SyncCount]:
    """Count what the calling thread does inside, its backward, and threads that are started inside.

    Args:
        device: "cuda", "cpu", or "cpu:0" for strict counting; None: CUDA where there is some. "cuda" on a
            machine without one simulates it: `torch.cuda.is_available()` is true inside, and what is put on
            `cuda` lives in CPU memory.
        warmup: steps to leave out: caches, autotuning, lazy initialisation.
        work: also count device work (operations, allocations, copies).
        steps: leave by SystemExit behind so many counted steps.
        by_steps: optimizers mark steps; without, everything counts, also behind the last one.
    """
    real = torch.cuda.is_available()
    named = torch.device(device) if device else torch.device("cuda" if real else "cpu")
    cuda, strict = named.type == "cuda" and real, named.index is not None
    ledger = Ledger(armed=True, work=work, asked={})
    simulates = named.type == "cuda" and not real
    program = ProgramBoundary(lambda: _forget(ledger)) if simulates else None
    boundary = program or Boundary(cuda=cuda, strict=strict)
    counted = SyncCount(ledger, warmup, program)
    start = threading.Thread.start

    def scope_of(name: str) -> Scope:
        scope = Scope(name, True, ledger)
        scope.mark_step(counted.finished)
        counted.scopes.append(scope)
        return scope

    def counted_start(thread: threading.Thread) -> None:
        run = thread.run  # its own, where a subclass has one

        def counted_run() -> None:
            with watched(
                scope_of(_named(thread.name)), None, cuda=cuda, strict=strict, boundary=boundary, hooks=False
            ):
                run()

        thread.run = counted_run  # type: ignore[method-assign]
        start(thread)

    rounds: set[int] = set()

    def stepped(optimizer: Any, *arguments: Any) -> None:
        # A step is a round of the loop: a second optimizer of the same round ends none.
        if not rounds or id(optimizer) in rounds:
            rounds.clear()
            counted.step()
            if steps is not None and counted.steps >= steps:
                raise SystemExit(0)
        rounds.add(id(optimizer))

    hook = register_optimizer_step_post_hook(stepped) if by_steps else None
    try:
        with (
            mock.patch.object(threading.Thread, "start", counted_start),
            watched(scope_of(role), None, cuda=cuda, strict=strict, boundary=boundary),
            simulated_cuda(program) if program else mock.patch.object(dist, "barrier", barrier(dist.barrier)),
            contextlib.nullcontext() if cuda or strict else host_loaders(_loose(program)),
        ):
            yield counted
    finally:
        if hook is not None:
            hook.remove()
        ledger.armed = False


def _named(thread: str) -> str:
    """A thread's name without the number that Python gives it: threads of a kind are one role."""
    return re.sub(r"^(Thread|ThreadPoolExecutor)-\d+(_\d+)?", r"\1", thread)


def _forget(ledger: Ledger) -> None:
    """Nothing was on a device before now."""
    ledger.counts.clear()
    if ledger.asked is not None:
        ledger.asked.clear()


def _loose(program: ProgramBoundary | None) -> Callable[[], bool]:
    """Whether the CPU is taken for the device just now."""
    return (lambda: True) if program is None else (lambda: not program.used)
