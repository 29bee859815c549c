"""The trainer, among what the harness can measure by name."""

from __future__ import annotations

from bench.subjects.trainer.kind import TrainerKind
from steptime.subjects.registry import SUBJECTS

SUBJECTS.entries.setdefault(TrainerKind.name, TrainerKind())
