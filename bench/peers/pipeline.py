"""The pipeline beside what its slowest stage does alone, in one run, and what lies between the two.

    python -m bench.peers.pipeline [--config FILE] [--set KEY=VALUE ...] [--rounds N] [--steps N] [--passes N]

Each round measures three rates over the same batches, tokens per second:

- alone: the targets by themselves, then the drafters by themselves. The slower one is the pipeline's bound.
- both at once: targets and drafters at the same time with nothing between them, no queue and no data, a pass
  of each after a pass of each. What is lost here is lost to the machine (shared cores, caches, memory) and to
  the interpreter lock.
- pipeline: the trainer itself, all collectors off, behind its first pass over the batches.

The rate is that of the median pass over the batches; a pipeline stands between the stages of its own round
and those of the next, whose mean is its bound. So there is one round of stages more than pipelines. Reported
are medians over the rounds, with quartiles, never a lone time."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

from dflash.config import Config, load_config
from dflash.data.batch import Batch
from dflash.data.plan import CyclePlan, EpochPlan
from dflash.observe.observer import Observer
from dflash.observe.roles import RoleMap
from dflash.pipeline.build import Inputs, prepare_inputs
from dflash.pipeline.drafter_worker import Replica
from dflash.pipeline.target_worker import TargetWorker
from dflash.pipeline.trainer import Trainer
from steptime.cli import guarded

CONFIG = Path(__file__).parents[2] / "configs" / "cpu-tiny.toml"
QUIET = ("observe.collectors=[]", 'observe.wandb="off"', 'observe.terminal="off"', "train.hang_s=0")
GOAL = 0.95

Pass = Callable[[], object]


@dataclass(frozen=True)
class Stages:
    """Rates of the two sides, tokens per second."""

    targets: float
    drafters: float

    @property
    def slower(self) -> float:
        return min(self.targets, self.drafters)


@dataclass(frozen=True)
class Round:
    """Stages before and behind a pipeline's run, and its own rate."""

    alone: tuple[Stages, Stages]
    beside: tuple[float, float]
    pipeline: float

    @property
    def of_alone(self) -> float:
        """The pipeline over its bound: the slower stage alone."""
        return self.pipeline / fmean(stages.slower for stages in self.alone)

    @property
    def of_beside(self) -> float:
        """The pipeline over both stages at the same time: what queue, data and order take."""
        return self.pipeline / fmean(self.beside)

    @property
    def beside_of_alone(self) -> float:
        """What the machine and the interpreter lock leave of the slower stage when both work."""
        return fmean(self.beside) / fmean(stages.slower for stages in self.alone)


# -- the stages ----------------------------------------------------------------------------------------------


class Work:
    """Passes of each worker over its share of the batches, without the pipeline.

    Args:
        trainer: built, not run yet; weights stay as they are.
    """

    def __init__(self, trainer: Trainer, steps: int) -> None:
        count = steps * len(trainer.replicas) * trainer.config.train.accumulation
        batches = [trainer._collator(trainer.plan.spec(index)) for index in range(count)]
        self.tokens = sum(batch.tokens for batch in batches)
        self._accumulation = trainer.config.train.accumulation
        targets, replicas = trainer.target_workers, trainer.replicas
        self.targets: list[Pass] = [
            self._target_pass(worker, batches[at :: len(targets)]) for at, worker in enumerate(targets)
        ]
        self.drafters: list[Pass] = [
            self._drafter_pass(replica, targets[0], batches[at :: len(replicas)])
            for at, replica in enumerate(replicas)
        ]

    @staticmethod
    def _target_pass(worker: TargetWorker, batches: Sequence[Batch]) -> Pass:
        def once() -> None:
            with worker.device.active():
                for batch in batches:
                    worker.hidden_states(batch).buffer.release()
                worker.device.synchronize()

        return once

    def _drafter_pass(self, replica: Replica, target: TargetWorker, batches: Sequence[Batch]) -> Pass:
        items: list[tuple[Batch, torch.Tensor, torch.Tensor | None]] = []
        for batch in batches:
            with target.device.active():
                item = target.hidden_states(batch)
                target.device.synchronize()
                parts = (item.features, item.last_hidden)
                features, last = (
                    None if one is None else one.to(replica.device.torch, copy=True) for one in parts
                )
                item.buffer.release()
            assert features is not None
            items.append((batch, features, last))

        def once() -> None:
            with replica.device.active():
                for at, (batch, features, last) in enumerate(items, start=1):
                    if at % self._accumulation == 1 or self._accumulation == 1:
                        replica.flat.zero_grad()
                    loss, _ = replica.forward_loss(batch, features, last)
                    loss.backward()
                    replica.flat.end_micro_batch(last=at % self._accumulation == 0)
                    if at % self._accumulation == 0:
                        replica.optimizer.step(0.0, 0.0)
                replica.device.synchronize()

        return once

    def alone(self, passes: int) -> Stages:
        """Each side by itself."""
        return Stages(*(self.tokens / pace(side, passes) for side in (self.targets, self.drafters)))

    def beside(self, passes: int) -> float:
        """Both at the same time, a pass of each after a pass of each: the rate of whoever is slower."""
        return self.tokens / pace([*self.targets, *self.drafters], passes)


def pace(works: Sequence[Pass], passes: int) -> float:
    """Seconds of the median pass, in which each worker does its share in a thread of its own.

    Raises:
        Exception: what the first failing worker raised.
    """
    seconds: list[float] = []
    errors: list[BaseException] = []
    start, done = threading.Barrier(len(works) + 1), threading.Barrier(len(works) + 1)

    def run(work: Pass) -> None:
        try:
            for _ in range(passes):
                start.wait()
                work()
                done.wait()
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors.append(error)
            start.abort()
            done.abort()

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    with contextlib.suppress(threading.BrokenBarrierError):
        for _ in range(passes):
            start.wait()
            began = time.perf_counter()
            done.wait()
            seconds.append(time.perf_counter() - began)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return median(seconds)


# -- the pipeline --------------------------------------------------------------------------------------------


class Boundaries:
    """When each step was done, by drafter 0: the trainer's hook."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def after_backward(self, loss: torch.Tensor, step: int) -> None:
        pass

    def after_step(self, step: int, tokens: int) -> bool:
        self.seconds.append(time.perf_counter())
        return True

    def after_step_of_others(self, step: int) -> None:
        pass

    def pass_s(self, steps: int) -> float:
        """Seconds of the median pass over the batches, the first one left out: in it the queue fills."""
        ends = self.seconds[steps - 1 :: steps]
        return median(np.diff(ends).tolist())


class Subject:
    """A config whose trainer can be built again and again over the same batches.

    Args:
        steps: optimizer steps in a pass over the batches.
        passes: over the batches; the pipeline makes two more.
    """

    def __init__(self, config: Config, steps: int, passes: int) -> None:
        tree = config.model_dump(mode="json")
        tree["train"] |= {"steps": steps * (passes + 2), "checkpoint_every": 0, "legs": []}
        self.steps, self.passes = steps, passes
        self.inputs: Inputs = prepare_inputs(Config.model_validate(tree))
        self.config = self.inputs.config

    def trainer(self, folder: Path) -> tuple[Trainer, Boundaries]:
        config, data = self.config, self.config.data
        count = self.steps * len(config.drafter.devices) * config.train.accumulation
        plan = EpochPlan(self.inputs.dataset.lengths, data.buckets, data.batch_size, data.seed)
        observer = Observer(config.observe, folder, RoleMap.from_config(config), sinks=[])
        hooks = Boundaries()
        options: dict[str, Any] = {"save_checkpoints": False, "keep_scalars": False}
        made = Trainer(self.inputs, folder, observer, plan=CyclePlan(plan, count), hooks=hooks, **options)
        return made, hooks

    def rounds(self, rounds: int) -> list[Round]:
        """Stages, pipeline, stages, pipeline, ..., stages."""
        alone, beside, pipelines = [], [], []
        for at in range(rounds + 1):
            with tempfile.TemporaryDirectory() as name:
                trainer, hooks = self.trainer(Path(name))
                try:
                    work = Work(trainer, self.steps)
                    alone.append(work.alone(self.passes))
                    beside.append(work.beside(self.passes))
                    if at < rounds:
                        trainer.run()
                        pipelines.append(work.tokens / hooks.pass_s(self.steps))
                finally:
                    trainer.observer.close()
        return [
            Round((alone[at], alone[at + 1]), (beside[at], beside[at + 1]), rate)
            for at, rate in enumerate(pipelines)
        ]


# -- the page ------------------------------------------------------------------------------------------------


def quartiles(shares: Sequence[float]) -> str:
    """`93.1% (91.0 to 95.2%)`: the median and the quartiles."""
    low, middle, high = np.quantile(np.asarray(shares), (0.25, 0.5, 0.75)).tolist()
    return f"{middle:.1%} ({100 * low:.1f} to {high:.1%})"


def report(rounds: Sequence[Round]) -> str:
    """Rates of each round, and the three ratios."""
    rows = [
        [
            *(f"{fmean(getattr(s, side) for s in one.alone):,.0f}" for side in ("targets", "drafters")),
            f"{fmean(one.beside):,.0f}",
            f"{one.pipeline:,.0f}",
            f"{one.of_alone:.1%}",
        ]
        for one in rounds
    ]
    heads = ["targets alone", "drafters alone", "both at once", "pipeline, tok/s", "of the slower alone"]
    reached = median(one.of_alone for one in rounds) >= GOAL
    return "\n".join(
        (
            tabulate(rows, heads, "github", disable_numparse=True),
            "",
            f"pipeline of its slowest stage alone:  {quartiles([one.of_alone for one in rounds])}, "
            f"goal {GOAL:.0%} {'reached' if reached else 'missed'}",
            f"  both at once, of that stage alone:  {quartiles([one.beside_of_alone for one in rounds])}: "
            "the machine and the interpreter lock",
            f"  pipeline, of both at once:          {quartiles([one.of_beside for one in rounds])}: "
            "queue, data and order",
            "",
        )
    )


def measure(arguments: Sequence[str] | None) -> int:
    """Print the rates; exit code 0 whether the goal is reached or not."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers.pipeline", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--config", default=str(CONFIG), help="TOML file of a run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--rounds", type=int, default=5, help="runs of the pipeline")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps in a pass over the batches")
    parser.add_argument("--passes", type=int, default=3, help="over the batches, in each measurement")
    asked = parser.parse_args(arguments)
    if min(asked.rounds, asked.steps, asked.passes) < 1:
        parser.error("--rounds, --steps and --passes: at least 1")
    config = load_config(asked.config, [*QUIET, *asked.settings])
    sys.stdout.write(report(Subject(config, asked.steps, asked.passes).rounds(asked.rounds)))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """A mistake of the user is one line on stderr and code 2."""
    return guarded(lambda: measure(arguments))


if __name__ == "__main__":
    sys.exit(main())
