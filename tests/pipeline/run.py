"""A whole run in miniature, for the pipeline's tests."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from dflash.config import Config, load_config
from dflash.observe.observer import Observer
from dflash.observe.roles import RoleMap
from dflash.observe.timeline.log import Timeline
from dflash.pipeline.build import Inputs, prepare_inputs
from dflash.pipeline.resume import check_same_run, find
from dflash.pipeline.trainer import Trainer
from tests.waiting import wait_until

SMALL = (
    "data.max_length=64",
    "data.buckets=[32, 64]",
    "data.batch_size=2",
    "target.tiny.hidden_size=32",
    "target.tiny.intermediate_size=64",
    "target.tiny.heads=2",
    "target.tiny.kv_heads=1",
    "target.tiny.head_dim=16",
    "target.tiny.linear_heads=2",
    "target.tiny.linear_head_dim=16",
    "target.tiny.layers=5",
    "target.tiny.vocab_size=64",
    "target.taps=2",
    "drafter.layers=2",
    "drafter.heads=2",
    "drafter.kv_heads=1",
    "drafter.head_dim=16",
    "drafter.block_size=4",
    "drafter.anchors=4",
    "drafter.mask_token_id=63",
    "objective.chunk_slots=16",
    "queue.capacity=4",
    "queue.hs_min_ready=1",
    "queue.ordered=true",
    "train.threads_per_worker=1",
    "train.steps=6",
    "train.tau_prompts=0",
    "train.lr=0.01",
    'observe.terminal="off"',
    'observe.wandb="off"',
)


def write_ids(path: Path, samples: int = 24) -> Path:
    """Pre-tokenised samples with a pattern that a drafter can learn: each token follows from the one
    before."""
    rows = []
    for index in range(samples):
        length = 20 + (index * 7) % 40
        ids = [(3 * index + 5 * place) % 60 + 1 for place in range(length)]
        rows.append(json.dumps({"input_ids": ids, "loss_mask": [int(place >= 5) for place in range(length)]}))
    path.write_text("\n".join(rows) + "\n")
    return path


def small_config(folder: Path, *settings: str) -> Config:
    data = folder / "ids.jsonl"
    if not data.exists():
        write_ids(data)
    return load_config(None, [*SMALL, f"data.path={data}", f"data.cache={folder / 'cache'}", *settings])


def small_trainer(
    folder: Path,
    *settings: str,
    name: str = "run",
    inputs: Inputs | None = None,
    rates: tuple[tuple[str, float], ...] = (),
    timeline: Timeline | None = None,
    **arguments,
) -> Trainer:
    """A trainer over `small_config`; its run folder is `folder / name`, and a checkpoint there is resumed."""
    config = inputs.config if inputs else small_config(folder, *settings)
    run_dir = folder / name
    if "resume" not in arguments:
        begin = find(run_dir, config)
        config, arguments["resume"] = begin.config, begin.state
    inputs = dataclasses.replace(inputs, config=config) if inputs else prepare_inputs(config)
    if arguments["resume"] is not None:
        check_same_run(arguments["resume"], inputs, str(run_dir))
    observer = Observer(config.observe, run_dir, RoleMap.from_config(config, rates), timeline=timeline)
    return Trainer(inputs, run_dir, observer, **arguments)


class Hooks:
    """Hooks that do nothing."""

    def after_backward(self, loss, step):
        pass

    def after_step(self, step, tokens):
        return True

    def after_step_of_others(self, step):
        pass


class Settled(Hooks):
    """Hooks that let every checkpoint be written before the next one is due, so that none is put off."""

    trainer: Trainer

    def after_step(self, step, tokens):
        every = self.trainer.config.train.checkpoint_every
        if (step + 1) % every == 0 and not self.trainer.supervisor.stopping.is_set():
            wait_until(lambda: self.trainer.saving.saver.idle or self.trainer.supervisor.stopping.is_set())
        return True


def settled_trainer(folder: Path, *settings: str, **arguments) -> Trainer:
    """A `small_trainer` whose checkpoints come at every `train.checkpoint_every` exactly; that is 2 or more,
    since one is written when the step after it has reported."""
    hooks = Settled()
    trainer = small_trainer(folder, *settings, hooks=hooks, **arguments)
    hooks.trainer = trainer
    return trainer


def losses(trainer: Trainer) -> list[float]:
    result = trainer.run()
    trainer.observer.close()
    return [row.loss for row in result.scalars]
