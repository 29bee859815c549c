"""A run of a config's layout on simulated devices, with a tiny target, and what it has proven.

What is kept is what the workers do with each other: devices and roles, the queue, the order, the objective,
the accumulation, packing, the hand-over, checkpoints. What is replaced is what costs: target, drafter,
batches and data are tiny, and a few steps are made."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from dflash.config import Config
from dflash.device import simulating
from dflash.observe.observer import Observer
from dflash.observe.roles import RoleMap
from dflash.observe.syncs.guard import GuardScopes
from dflash.pipeline.build import prepare_inputs
from dflash.pipeline.supervisor import Failure, WorkerFailed
from dflash.pipeline.trainer import Trainer
from steptime.simulate import Counts

STEPS = 3
SEEDS = (None, 0)
"""Of the delays at hand-overs; None: no delays."""


@dataclass(frozen=True)
class Run:
    """One simulated run.

    Attributes:
        failure: what ended it early; None when it was clean.
        counts: what was checked.
        losses: by step.
    """

    seed: int | None
    failure: Failure | None
    counts: Counts
    losses: tuple[float, ...]
    seconds: float


def layout_of(config: Config, folder: Path) -> Config:
    """The config with simulated devices, and with a tiny target, drafter and data set (written to
    `folder`)."""
    tree = config.model_dump(mode="json")
    data, target, drafter, train = tree["data"], tree["target"], tree["drafter"], tree["train"]
    taps = len(target["layer_ids"]) or target["taps"]
    for section in (target, drafter):
        section["devices"] = [f"sim:{name.partition(':')[2] or 0}" for name in section["devices"]]
    data |= {"path": str(_write_data(folder)), "cache": str(folder / "cache"), "tokenizer": "", "heldout": ""}
    data |= {"max_length": 64, "buckets": [32, 64], "batch_size": min(2, data["batch_size"])}
    target |= {"model": "tiny-hybrid", "layer_ids": [], "taps": taps}
    target["tiny"] |= {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, "layers": taps + 3}
    target["tiny"] |= {"heads": 2, "kv_heads": 1, "head_dim": 16, "linear_heads": 2, "linear_head_dim": 16}
    drafter |= {"layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "block_size": 4, "anchors": 4}
    drafter |= {"hidden_size": 0, "intermediate_size": 0, "mask_token_id": 63, "init": "", "compile": False}
    drafter |= {"attention": "split", "sliding_window": 16}
    drafter["sliding_layers"] = min(1, drafter["sliding_layers"])
    tree["objective"]["chunk_slots"] = 32
    train |= {"steps": STEPS, "checkpoint_every": min(2, train["checkpoint_every"]), "heldout_every": 0}
    train |= {"threads_per_worker": 1, "hang_s": 60.0, "legs": []}
    tree["observe"] |= {"wandb": "off", "terminal": "off", "tensorboard": False, "sinks": [], "tick_s": 0.1}
    return Config.model_validate(tree)


def _write_data(folder: Path) -> Path:
    path = folder / "ids.jsonl"
    rows = []
    for index in range(64):
        length = 20 + (index * 7) % 40
        ids = [(3 * index + 5 * place) % 60 + 1 for place in range(length)]
        rows.append(json.dumps({"input_ids": ids, "loss_mask": [int(place >= 5) for place in range(length)]}))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def simulate_layout(config: Config) -> int:
    """Run the layout with each of `SEEDS`, print what was proven or the first fault; the exit code."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        layout = layout_of(config, folder)
        for number, seed in enumerate(SEEDS):
            run = simulated_run(layout, folder / f"run-{number}", seed)
            if run.failure is not None:
                sys.stdout.write(fault_text(run))
                return 1
            sys.stdout.write(proof_text(layout, run))
    sys.stdout.write("no race, no misuse, no undeclared wait\n")
    return 0


def simulated_run(config: Config, run_dir: Path, seed: int | None = None) -> Run:
    """One run on simulated devices in which no worker may wait for its device."""
    started_s = time.perf_counter()
    failure = None
    with simulating((*config.target.devices, *config.drafter.devices), seed) as simulation:
        assert simulation is not None
        inputs = prepare_inputs(config)
        observer = Observer(config.observe, run_dir, RoleMap.from_config(config))
        trainer = Trainer(inputs, run_dir, observer, scopes=GuardScopes("disallow"))
        try:
            trainer.run()
        except WorkerFailed as error:
            failure = error.failure
        finally:
            observer.close()
        losses = tuple(row.loss for row in trainer.result.scalars)
        return Run(seed, failure, simulation.counts, losses, time.perf_counter() - started_s)


def fault_text(run: Run) -> str:
    """What ended the run, in one line with its role."""
    assert run.failure is not None
    error = run.failure.error
    return f"fault found, in {run.failure.role}: {type(error).__name__}: {error}\n"


def proof_text(config: Config, run: Run) -> str:
    """What the run has shown, within 80 columns."""
    counts = run.counts
    targets, drafters = len(config.target.devices), len(config.drafter.devices)
    order = "ordered" if config.queue.ordered else "mixed"
    handed = sum(
        size for (_, _, place), (_, size) in counts.copied_at.items() if place.file.endswith("hand_over.py")
    )
    peers = counts.copies.get("device to device", [0, 0])
    delays = "no delays" if run.seed is None else f"delays of seed {run.seed}"
    return "\n".join(
        (
            f"{config.name}: {targets} targets, {drafters} drafters, {order}, {config.objective.kind}, "
            f"accumulation {config.train.accumulation}",
            f"  {len(run.losses)} steps in {run.seconds:.1f} s, {delays}",
            f"  {counts.operations:>10,} operations checked, {counts.accesses:,} accesses to memory",
            f"  {len(counts.ordered):>10,} pairs of streams ordered, of {counts.streams} streams",
            f"  {counts.records:>10,} events recorded, {counts.waits:,} waited for",
            f"  {counts.hand_overs:>10,} hand-overs between threads",
            f"  {peers[0]:>10,} copies between devices, {peers[1]:,} bytes",
            f"  {handed // max(1, len(run.losses)):>10,} bytes handed over per step",
            f"  {counts.frees:>10,} tensors freed, none while another stream used it",
            "",
        )
    )
