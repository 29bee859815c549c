"""The trainer, among what the harness can measure by name; and the light subject under the trainer's
settings, so that both take the same options."""

from __future__ import annotations

from collections.abc import Sequence

from bench.subjects.trainer.kind import TrainerKind
from dflash.config import Config
from steptime.subjects.registry import DEFAULT, SUBJECTS
from steptime.subjects.spin import SpinKind


class BenchSpin(SpinKind):
    """`--subject spin` of `python -m bench`."""

    doors = TrainerKind.doors

    def settings(self, config: str | None, changes: Sequence[str]) -> Config:
        return TrainerKind().settings(config, changes)


SUBJECTS.entries.setdefault(TrainerKind.name, TrainerKind())
SUBJECTS.entries[SpinKind.name] = BenchSpin()
DEFAULT[:] = [TrainerKind.name]
