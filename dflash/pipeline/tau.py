"""The acceptance length in decoding, on a few held-out prompts, between two steps: `train/tau`.

Training stands still meanwhile: drafter 0's thread decodes, the others wait for it at the next exchange, and
the targets fill the queue. The target that decodes shares the weights of the one that trains and nothing
else (`Target.twin`), so neither disturbs the other."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from dflash.data.conversations import stdlib_file
from dflash.decode.generate import speculate
from dflash.decode.prompts import read_prompts, stop_ids
from dflash.decode.target_state import check_continues
from dflash.device import Device
from dflash.models.dtypes import say_once
from dflash.observe.accounting import Account
from dflash.observe.syncs import allowed_sync
from dflash.pipeline.build import Inputs
from dflash.pipeline.drafter_worker import Replica
from dflash.release.released import build_drafter
from steptime.errors import UserError

if TYPE_CHECKING:
    from dflash.models.target import Target

NAME = "tau"
_SPARE_ROWS = 4
"""So many times the wanted prompts are read, since some may be too long."""


@dataclass(frozen=True, slots=True)
class Look:
    """One measurement.

    Attributes:
        step: steps done.
        tau: committed tokens per verification, over all prompts; NaN when every answer ended with its first
            token.
        seconds: for so long training stood still.
    """

    step: int
    tau: float
    seconds: float

    def metrics(self) -> dict[str, float]:
        """As `train/tau`; nothing where no draft was judged."""
        return {} if math.isnan(self.tau) else {"train/tau": self.tau}


class Tau:
    """Decodes with one replica's weights. `look` belongs to its worker's thread, `take` to the main thread.

    Args:
        target: whose twin decodes; nobody runs it yet.
        stopping: the run is ending at once; a look that comes then is left out.

    Attributes:
        decoded: moves at the beginning and at the end of each look, for the watchdog.
        seconds: how long training has stood still.

    Raises:
        UserError: no prompt can be read, or the target's family cannot be decoded here.
    """

    def __init__(self, inputs: Inputs, target: Target, replica: Replica, stopping: threading.Event) -> None:
        settings = inputs.config.train
        self._replica, self._stopping = replica, stopping
        self._device = Device(target.device.name)
        self._prompts = held_out_prompts(inputs)
        self._options: dict[str, Any] = {
            "max_new_tokens": settings.tau_tokens,
            "stop_ids": stop_ids(target, inputs.tokenizer),
        }
        with self._device.active():
            self._target = target.twin(self._device)
            check_continues(self._target)
            # As `dflash eval` builds it: beside the target, in its type.
            self._drafter = build_drafter(
                inputs.shape, self._masters(), self._device.torch, self._target.embedding.dtype
            )
            self._device.synchronize()
        self._looks: deque[Look] = deque()
        self.decoded, self.seconds = 0, 0.0

    def look(self, steps_done: int) -> None:
        """Measure the weights after `steps_done` steps; waits for the device."""
        if self._stopping.is_set():
            return
        began_ns = time.perf_counter_ns()
        self.decoded += 1
        with allowed_sync("train/tau: training stands still while prompts are decoded"):
            tau = self.now()
        self.decoded += 1
        seconds = (time.perf_counter_ns() - began_ns) / 1e9
        self.seconds += seconds
        self._looks.append(Look(steps_done, tau, seconds))

    def now(self) -> float:
        """τ of the weights as they are. Waits for the device."""
        self._replica.device.synchronize()
        with self._device.active():
            self._drafter.load_state(self._masters())
            found = speculate(self._target, self._drafter, self._prompts, **self._options)
            self._device.synchronize()
        tokens = [cycle.tokens for row in found.rows for cycle in row.cycles]
        return fmean(tokens) if tokens else math.nan

    def take(self) -> list[Look]:
        """What was measured since the last call."""
        return [self._looks.popleft() for _ in range(len(self._looks))]

    def account(self, elapsed_s: float) -> Account:
        """What it has cost, as a collector's account."""
        return Account(NAME, elapsed_s, 0, 0.0, self.seconds)

    def _masters(self) -> dict[str, torch.Tensor]:
        flat = self._replica.flat
        return dict(flat.named(flat.master))


def held_out_prompts(inputs: Inputs) -> list[list[int]]:
    """The first `train.tau_prompts` prompts of `data.heldout` that are no longer than `data.max_length`.

    Raises:
        UserError: there is none, or a row before them is no prompt.
    """
    data, train, context = inputs.config.data, inputs.config.train, inputs.info.max_positions
    file = Path(data.heldout)
    if data.heldout == "stdlib":
        file = stdlib_file(data, inputs.tokenizer, "train")
    read = read_prompts(
        file,
        inputs.tokenizer,
        inputs.info.vocab_size,
        limit=_SPARE_ROWS * train.tau_prompts,
        context=0,
        max_new_tokens=train.tau_tokens,
        cache=data.cache,
        longest=data.max_length,
        reasoning=data.reasoning,
    )
    longest = min(data.max_length, context - train.tau_tokens if context else data.max_length)
    found = [list(prompt.ids) for prompt in read if len(prompt.ids) <= longest]
    if not found:
        raise UserError(f"{file}: no prompt of at most {longest} tokens among its first {len(read)}")
    return found[: train.tau_prompts]


def make_tau(inputs: Inputs, target: Target, replica: Replica, stopping: threading.Event) -> Tau | None:
    """None, and a line that says why, where nothing can be decoded: training goes without."""
    try:
        return Tau(inputs, target, replica, stopping)
    except UserError as error:
        say_once(f"no train/tau: {error}")
        return None
