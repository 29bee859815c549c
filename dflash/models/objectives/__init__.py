"""What a drafter may minimise, one file each."""

from __future__ import annotations

from dflash.config import ObjectiveConfig
from dflash.models.objectives.base import BlockObjective
from dflash.models.objectives.ce import CrossEntropy
from dflash.models.objectives.dpace import DPace
from dflash.models.objectives.kd import Distillation
from steptime.registry import Registry

OBJECTIVES: Registry[type[BlockObjective]] = Registry("objective", CrossEntropy, DPace, Distillation)


def make_objective(config: ObjectiveConfig, softcap: float = 0.0) -> BlockObjective:
    """The objective that the settings name, for a target whose logits are capped at `softcap` (0: not).

    Raises:
        UserError: there is none of that name.
    """
    return OBJECTIVES[config.kind](config, softcap)
