"""Checkpoints: written whole or not at all, resumed exactly.

A checkpoint is a folder `step-00001234` with `state.safetensors` (the drafter's float32 masters and the
optimizer's moments) and `state.json` (step, place in the plan, what the run was). It appears under its name
by a rename, after its files are on disk: what can be read was finished."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dflash.data.batch import BatchSpec
from dflash.data.plan import Plan
from steptime.errors import UserError

SCHEMA = "dflash-checkpoint/1"
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class Progress:
    """Where a run stands.

    Attributes:
        step: optimizer steps done.
        floor: every batch of the plan below this index has been trained on.
        ahead: indices at or over `floor` that were trained on too (drafters that draw in mixed order).
    """

    step: int = 0
    floor: int = 0
    ahead: tuple[int, ...] = ()


@dataclass(frozen=True)
class State:
    """A checkpoint in memory."""

    progress: Progress
    tensors: dict[str, torch.Tensor]
    drafter_shape: dict[str, Any]
    config_digest: str


def progress_after(step: int, base: Progress, consumed: set[int]) -> Progress:
    """`base` plus the batches `consumed` since then, in the tightest form."""
    done = consumed | set(base.ahead)
    floor = base.floor
    while floor in done:
        done.remove(floor)
        floor += 1
    return Progress(step, floor, tuple(sorted(index for index in done if index >= floor)))


class RemainingPlan:
    """A plan without the batches that were trained on: `spec(i)` is the i-th one left, under its own
    index."""

    def __init__(self, inner: Plan, progress: Progress) -> None:
        self._inner, self._floor, self._ahead = inner, progress.floor, progress.ahead

    def spec(self, i: int) -> BatchSpec:
        index = self._floor + i
        for taken in self._ahead:
            if taken <= index:
                index += 1
        return self._inner.spec(index)


def flatten(tree: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`{"master": {"fc.weight": t}}` as `{"master/fc.weight": t}`, in host memory."""
    flat: dict[str, torch.Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= {f"{key}/{name}": tensor for name, tensor in flatten(value).items()}
        else:
            flat[key] = value.cpu()
    return flat


def unflatten(flat: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for path, tensor in flat.items():
        head, _, rest = path.partition("/")
        if rest:
            tree.setdefault(head, {})[rest] = tensor
        else:
            tree[head] = tensor
    return tree


def save(folder: Path, state: State, keep: int) -> Path:
    """Write `state` under `folder`, then remove all but the newest `keep` checkpoints. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{state.progress.step:08d}"
    draft = folder / f".{final.name}.{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    save_file(state.tensors, draft / "state.safetensors")
    record = {
        "schema": SCHEMA,
        "progress": asdict(state.progress),
        "drafter_shape": state.drafter_shape,
        "config_digest": state.config_digest,
    }
    (draft / "state.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    for path in (*draft.iterdir(), draft):
        _fsync(path)
    if final.exists():
        shutil.rmtree(final)
    draft.rename(final)
    _fsync(folder)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())


def load(path: Path) -> State:
    """Read one checkpoint.

    Raises:
        UserError: none there, or not one of ours.
    """
    try:
        record = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if record.get("schema") != SCHEMA:
            raise UserError(f"{path}: schema {record.get('schema')!r}, expected {SCHEMA!r}")
        tensors = load_file(path / "state.safetensors")
    except (OSError, json.JSONDecodeError, SafetensorError, AttributeError) as error:
        raise UserError(f"{path}: cannot read this checkpoint: {error}") from None
    progress = record["progress"]
    return State(
        Progress(progress["step"], progress["floor"], tuple(progress["ahead"])),
        tensors,
        record["drafter_shape"],
        record["config_digest"],
    )


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
