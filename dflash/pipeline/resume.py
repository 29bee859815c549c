"""May this run go on from that checkpoint? Settings of three kinds decide, each declared in `config.py`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash.config import Config, Effect, TrainConfig, effects
from dflash.data.dataset import Dataset
from dflash.pipeline.build import Inputs
from dflash.pipeline.checkpoint import State, newest
from dflash.pipeline.run_folder import CHECKPOINTS
from steptime.errors import UserError

RULED = ("train.steps", "train.schedule", "train.legs", "train.accumulation")
"""Settings that change training, and that a resumed run may change by the rules below."""
RANKS = "ranks"
"""In a checkpoint's settings: how many ranks its run had."""
_LOOKED_AT = 1000


@dataclass(frozen=True)
class Resumption:
    """How a run begins.

    Attributes:
        config: the settings asked for, with what follows from the checkpoint.
        state: the checkpoint that it goes on from; None: it begins anew.
        notes: lines for the user.
    """

    config: Config
    state: State | None = None
    notes: tuple[str, ...] = ()

    @property
    def steps_done(self) -> int:
        return self.state.progress.step if self.state else 0


def find(run_dir: Path, config: Config, ranks: int = 1) -> Resumption:
    """Where the run in a folder goes on, under these settings and on so many ranks.

    Raises:
        UserError: its newest checkpoint is damaged, or belongs to other settings.
    """
    state = newest(run_dir / CHECKPOINTS)
    if state is None:
        return Resumption(config)
    return resumption(config, state, f"{run_dir} (step {state.progress.step})", ranks)


def resumption(config: Config, state: State, where: str, ranks: int = 1) -> Resumption:
    """The settings of a run that goes on from `state`.

    Raises:
        UserError: a setting that changes what is learnt is another one; each with both values.
    """
    # A setting that the checkpoint's version did not have was what it is by default today.
    before, now = Config().leaves() | {RANKS: 1} | state.settings, config.leaves() | {RANKS: ranks}
    kinds = effects()
    reasons = [
        f"{key} was {before[key]!r}, now {now.get(key, 'no setting of this version')!r}"
        for key in sorted(before)
        if kinds.get(key, Effect.TRAINING) is Effect.TRAINING
        and key not in (*RULED, RANKS)
        and before[key] != now.get(key)
    ]
    steps, planned = config.train.steps, _number(before, "train.steps", where)
    if steps < planned:
        reasons.append(f"train.steps was {planned}, now {steps}: a plan may grow, not shrink")
    if config.train.legs and list(config.train.legs) != before["train.legs"]:
        reasons.append(f"train.legs was {before['train.legs']}, now {list(config.train.legs)}")
    accumulation, notes = _accumulation(config, ranks, before, where, reasons)
    if reasons:
        raise UserError(
            f"{where}: its run had other settings: {'; '.join(reasons)}; use another --out, or start a new "
            "run from its weights with drafter.init"
        )
    legs, more = _schedule(config.train, before, planned)
    train = config.train.model_copy(update={"accumulation": accumulation, "legs": legs})
    return Resumption(config.model_copy(update={"train": train}), state, (*more, *notes))


def _schedule(train: TrainConfig, before: dict[str, Any], planned: int) -> tuple[tuple[int, ...], list[str]]:
    """The rule for more steps: as if so many had been planned, or a rise and fall of their own."""
    legs = tuple(before["train.legs"])
    if train.steps == planned:
        return legs, []
    if train.schedule == "extend":
        return (*legs, planned), [
            f"steps {planned:,} to {train.steps:,} have a rise and fall of the rate of their own"
        ]
    return legs, [
        f"{train.steps:,} steps instead of {planned:,}: the rate goes on as if so many had been planned; "
        "train.schedule=extend gives the added steps a rise and fall of their own"
    ]


def _accumulation(
    config: Config, ranks: int, before: dict[str, Any], where: str, reasons: list[str]
) -> tuple[int, list[str]]:
    """Another number of drafters, or of ranks, keeps the batches of a step."""
    drafters, asked = len(config.drafter.devices) * ranks, config.train.accumulation
    old_drafters = len(before["drafter.devices"]) * _number(before, RANKS, where)
    old = _number(before, "train.accumulation", where)
    batches = old * old_drafters
    if drafters * asked == batches:
        return asked, []
    if drafters == old_drafters:
        reasons.append(f"train.accumulation was {old}, now {asked}")
        return asked, []
    if batches % drafters:
        fitting = ", ".join(str(count) for count in range(1, batches + 1) if batches % count == 0)
        reasons.append(
            f"drafter.devices were {old_drafters}, now {drafters}: a step has {batches} batches, which so "
            f"many cannot share evenly ({fitting} could)"
        )
        return asked, []
    return batches // drafters, [
        f"{drafters} drafters instead of {old_drafters}: train.accumulation is {batches // drafters}, so "
        f"that a step keeps its {batches} batches"
    ]


def check_same_run(state: State, inputs: Inputs, where: str) -> None:
    """Refuse to go on with other samples or another drafter.

    Raises:
        UserError: one of them differs.
    """
    if state.samples != fingerprint(inputs.dataset):
        raise UserError(
            f"{where}: its run trained on other samples than data.path = {inputs.config.data.path!r} has "
            "now; put the old data back, or use another --out"
        )
    for key, value in json.loads(json.dumps(asdict(inputs.shape))).items():
        if (before := state.drafter_shape.get(key)) != value:
            raise UserError(f"{where}: the drafter's {key} was {before!r}, now {value!r}; use another --out")


def fingerprint(dataset: Dataset) -> str:
    """Hex digits that change with the samples: the lengths of all, the tokens and masks of a thousand of
    them, evenly spread."""
    hashed = hashlib.blake2b(digest_size=16)
    hashed.update(np.ascontiguousarray(dataset.lengths, np.int64).tobytes())
    samples, count = dataset.samples, len(dataset.samples)
    for index in range(0, count, max(1, count // _LOOKED_AT)):
        sample = samples[index]
        hashed.update(np.ascontiguousarray(sample.input_ids).tobytes())
        hashed.update(np.ascontiguousarray(sample.loss_mask).tobytes())
    return hashed.hexdigest()


def _number(settings: dict[str, Any], key: str, where: str) -> int:
    value = settings.get(key)
    if not isinstance(value, int) or value < 1:
        raise UserError(f"{where}: its state.json has no {key}")
    return value
