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
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from steptime.counting.difference import Counts, counts_table
from steptime.syncs.counting import summed, watched
from steptime.syncs.scopes import GRAPH, OPERATION, WORK, Ledger, Scope

MAIN = "main"


class SyncCount:
    """What was counted so far.

    Attributes:
        warmup: steps that are not counted.
        finished: steps ended, warm-up included.
    """

    def __init__(self, ledger: Ledger, warmup: int) -> None:
        self._ledger, self.warmup = ledger, warmup
        self.finished = 0
        self.scopes: list[Scope] = []

    def step(self) -> None:
        """A step of the program has ended."""
        self.finished += 1
        for scope in self.scopes:
            scope.mark_step(self.finished)

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
    *, device: str | None = None, warmup: int = 0, role: str = MAIN, work: bool = False
) -> Iterator[SyncCount]:
    """Count what the calling thread does inside, its backward, and threads that are started inside by
    `Thread(target=...)`.

    Args:
        device: "cuda", "cpu", or "cpu:0" for strict counting; None: CUDA where there is some.
        warmup: steps to leave out: caches, autotuning, lazy initialisation.
        work: also count device work (operations, allocations, copies).
    """
    named = torch.device(device) if device else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda, strict = named.type == "cuda", named.index is not None
    ledger = Ledger(armed=True, work=work)
    counted = SyncCount(ledger, warmup)
    run = threading.Thread.run

    def scope_of(name: str) -> Scope:
        scope = Scope(name, True, ledger)
        scope.mark_step(counted.finished)
        counted.scopes.append(scope)
        return scope

    def counted_run(thread: threading.Thread) -> None:
        with watched(scope_of(thread.name), None, cuda=cuda, strict=strict):
            run(thread)

    def stepped(*arguments: Any) -> None:
        counted.step()

    hook = register_optimizer_step_post_hook(stepped)
    try:
        with (
            mock.patch.object(threading.Thread, "run", counted_run),
            watched(scope_of(role), None, cuda=cuda, strict=strict),
        ):
            yield counted
    finally:
        hook.remove()
        ledger.armed = False
