"""`--subject trainer`: the real trainer, what is counted of it, and how its settings travel to another
process."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.subjects.trainer.harness import harness_config
from bench.subjects.trainer.pairs import PairTrainer
from dflash.config import Config, load_config
from steptime.arguments import CONFIG
from steptime.cuda_settings import deterministic
from steptime.machine.commit import ROOT
from steptime.nvml import cuda_indexes
from steptime.records.types import ALL, ExactCounts
from steptime.subjects.injection import Injection
from steptime.subjects.protocol import Doors


class TrainerKind:
    """The settings are a `dflash.config.Config`."""

    name = "trainer"
    doors = Doors("bench", "bench.gate_worker", "bench.counting")
    root = ROOT
    counted = True
    gate_launches: int | None = None

    def settings(self, config: str | None, changes: Sequence[str]) -> Config:
        return load_config(config or CONFIG, changes)

    def devices(self, settings: Config) -> tuple[str, ...]:
        return (*settings.target.devices, *settings.drafter.devices)

    def make_pairs(
        self,
        settings: Config,
        *,
        injections: Sequence[Injection] = (),
        plant: str = "",
        time_stages: bool = False,
    ) -> PairTrainer:
        return PairTrainer(
            settings, injections=injections, plants=(plant,) if plant else (), time_stages=time_stages
        )

    def counted_as(self, settings: Config) -> Mapping[str, Any]:
        return harness_config(settings).model_dump(mode="json", exclude_defaults=True)

    def count(self, request: Mapping[str, Any]) -> Mapping[str, ExactCounts]:
        from bench.subjects.trainer.counts import CYCLE, count_arms, exact_counts
        from dflash.observe.registry import COLLECTORS

        arms = dict(request["arms"])
        if request["all_collectors"]:
            arms[ALL] = list(COLLECTORS.names)
        config = Config.model_validate(request["config"])
        return exact_counts(count_arms(config, arms, plants=request["plants"], cycle=CYCLE))

    def to_order(self, settings: Config, cache: Callable[[Path, str], Path]) -> dict[str, Any]:
        order = settings.anchored(Path.cwd()).model_dump(mode="json", exclude_defaults=True)
        order.setdefault("data", {})["cache"] = str(cache(Path(settings.data.cache).resolve(), "dflash/data"))
        return order

    def from_order(self, order: Mapping[str, Any]) -> Config:
        return Config.model_validate(order)

    def trace(self, settings: Config, steps: int) -> list[tuple[int, float, float]]:
        """With the learning rate that the user set: a gate measures with weights that stand still, which an
        optimizer that does other work would pass unseen. On CUDA under deterministic kernels: traces are
        compared by their bits."""
        from dflash.observe.observer import Observer
        from dflash.observe.roles import RoleMap
        from dflash.pipeline.build import prepare_inputs
        from dflash.pipeline.trainer import Trainer

        ordered = harness_config(settings)
        train = settings.train.model_copy(update={"steps": steps, "checkpoint_every": 0})
        ordered = ordered.model_copy(update={"train": train})
        with tempfile.TemporaryDirectory(prefix="dflash-trace-") as folder:
            observer = Observer(ordered.observe, Path(folder), RoleMap.from_config(ordered))
            try:
                with deterministic() if cuda_indexes(self.devices(settings)) else contextlib.nullcontext():
                    result = Trainer(
                        prepare_inputs(ordered), Path(folder), observer, save_checkpoints=False
                    ).run()
            finally:
                observer.close()
        return [(row.step, row.loss, row.grad_norm) for row in result.scalars]
