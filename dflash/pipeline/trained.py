"""A drafter out of a run's own checkpoint, for evaluation and export."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash.models.drafter import DrafterShape
from dflash.pipeline import checkpoint
from dflash.pipeline.history import History, mean
from dflash.release.released import check_tensors
from steptime.errors import UserError


@dataclass(frozen=True)
class Trained:
    """A drafter from a run's checkpoint.

    Attributes:
        tensors: float32 masters.
        logged_tau: mean accepted length that training logged in its last steps; None where it is not there.
        settings: the run's config.json; None when it is not beside the checkpoints.
    """

    shape: DrafterShape
    tensors: dict[str, torch.Tensor]
    step: int
    settings: Path | None
    path: Path
    logged_tau: float | None = None


def load_trained(path: str | Path) -> Trained:
    """Read a checkpoint: a run's folder (its newest one), or a `step-...` folder itself.

    Raises:
        UserError: none there, or tensors that do not fit its shape, by name.
    """
    folder = Path(path)
    if not (folder / "state.json").exists():
        found = checkpoint.checkpoints(folder / "checkpoints") or checkpoint.checkpoints(folder)
        if not found:
            raise UserError(
                f"{path}: no checkpoint here; give a run's folder or a step-... folder in its checkpoints/"
            )
        folder = found[-1]
    state = checkpoint.load(folder)
    masters = checkpoint.unflatten(state.tensors).get("master", {})
    try:
        shape = DrafterShape(
            **{**state.drafter_shape, "target_layer_ids": tuple(state.drafter_shape["target_layer_ids"])}
        )
    except (TypeError, KeyError) as error:
        raise UserError(f"{folder}: its drafter_shape cannot be read: {error}") from None
    check_tensors(masters, shape, str(folder), torch.float32)
    settings = folder.resolve().parent.parent / "config.json"
    found_settings = settings if settings.exists() else None
    return Trained(shape, masters, state.progress.step, found_settings, folder, _logged_tau(state.history))


def _logged_tau(history: dict[str, Any]) -> float | None:
    try:
        part = History.from_dict(history).window()
    except (KeyError, TypeError, ValueError):
        return None
    value = mean(part).accept_length if part else math.nan
    return value if math.isfinite(value) else None
