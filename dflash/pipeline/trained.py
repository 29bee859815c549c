"""A drafter out of a run's own checkpoint, for evaluation and export."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from dflash.models.drafter import DrafterShape
from dflash.pipeline import checkpoint
from dflash.release.released import check_tensors
from steptime.errors import UserError


@dataclass(frozen=True)
class Trained:
    """A drafter from a run's checkpoint.

    Attributes:
        tensors: float32 masters.
        settings: the run's config.json; None when it is not beside the checkpoints.
    """

    shape: DrafterShape
    tensors: dict[str, torch.Tensor]
    step: int
    settings: Path | None
    path: Path


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
    return Trained(shape, masters, state.progress.step, settings if settings.exists() else None, folder)
