"""Real runs of `dflash train`, each in a process of its own, some with a fault planted in them."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

STEPS = 24
END_S = 120.0
"""A trial that takes longer has no end."""
LAYOUTS = {
    "1 drafter": (),
    "3 drafters": ('drafter.devices=["cpu:0","cpu:1","cpu:2"]',),
    "mixed order": ("queue.ordered=false", 'drafter.devices=["cpu:0","cpu:1"]'),
    "2 ranks": (),
    "4 ranks": (),
    "2 ranks, mixed order": ("queue.ordered=false",),
}
RANKS = {"2 ranks": 2, "4 ranks": 4, "2 ranks, mixed order": 2}
"""Processes of a run; 1 where there is nothing said."""
ALONE = tuple(layout for layout in LAYOUTS if layout not in RANKS)
SETTINGS = (
    *("data.max_length=64", "data.buckets=[32, 64]", "data.batch_size=2"),
    *("target.tiny.hidden_size=32", "target.tiny.intermediate_size=64", "target.tiny.heads=2"),
    *("target.tiny.kv_heads=1", "target.tiny.head_dim=16", "target.tiny.linear_heads=2"),
    *("target.tiny.linear_head_dim=16", "target.tiny.layers=5", "target.tiny.vocab_size=64", "target.taps=2"),
    *("drafter.layers=2", "drafter.heads=2", "drafter.kv_heads=1", "drafter.head_dim=16"),
    *("drafter.block_size=4", "drafter.anchors=4", "drafter.mask_token_id=63", "objective.chunk_slots=16"),
    *("queue.capacity=4", "queue.hs_min_ready=1", "queue.ordered=true", "train.threads_per_worker=1"),
    *(f"train.steps={STEPS}", "train.lr=0.01", "train.checkpoint_every=3", "train.hang_s=3"),
    *("observe.terminal=off", "observe.wandb=off"),
)


class Trials:
    """Runs the command line in processes of its own, all of them below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._context = multiprocessing.get_context("forkserver")
        modules = [
            "bench.reliability.trials",
            "dflash.cli",
            "dflash.pipeline.trainer",
            "dflash.pipeline.resume",
        ]
        modules += ["dflash.observe.registry", "transformers.models.qwen3_5.modeling_qwen3_5"]
        self._context.set_forkserver_preload([*modules, "matplotlib.pyplot"])
        self.data = folder / "ids.jsonl"
        write_data(self.data)
        self._count = 0
        self._whole: dict[str, bytes] = {}

    def new(self) -> Path:
        """A run folder that is not there yet."""
        self._count += 1
        return self.folder / f"run-{self._count}"

    def start(self, out: Path, layout: str, plant: str = "", *more: str) -> BaseProcess:
        """Start `dflash train`, with a fault planted in it."""
        return self._start(out, layout, plant, more, {})

    def start_ranks(self, out: Path, layout: str) -> list[BaseProcess]:
        """Start it on the layout's ranks."""
        ranks, port = RANKS[layout], free_port()
        together = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        environments = [together | {"RANK": rank} for rank in range(ranks)]
        return [self._start(out, layout, "", (), environment) for environment in environments]

    def _start(
        self, out: Path, layout: str, plant: str, more: tuple[str, ...], place: dict[str, int]
    ) -> BaseProcess:
        rank = place.get("RANK", 0)
        settings = (
            *SETTINGS,
            f"data.path={self.data}",
            f"data.cache={self.folder / f'cache{rank or str()}'}",
            *LAYOUTS[layout],
        )
        command = ["train", "--out", str(out)]
        for setting in settings:
            command += ["--set", setting]
        words = [*command, *more]
        process = self._context.Process(target=child, args=(words, plant, str(log(out, rank)), place))
        process.start()
        return process

    def run(self, out: Path, layout: str, plant: str = "", *more: str) -> int:
        """The same to its end; the exit code, the highest where there are several ranks."""
        if layout in RANKS:
            return max(end(process) for process in self.start_ranks(out, layout))
        return end(self.start(out, layout, plant, *more))

    def whole(self, layout: str) -> bytes:
        """The last checkpoint of a run that nothing befell."""
        if layout not in self._whole:
            out = self.new()
            assert self.run(out, layout) == 0, log(out).read_text()
            self._whole[layout] = weights(out)
        return self._whole[layout]

    def lost(self, out: Path, layout: str) -> int:
        """Of a run that has been brought to its end: 1 when anything is not as in the uninterrupted run."""
        if rows(out) != set(range(STEPS)):
            return 1
        if "mixed order" in layout:  # the order is the threads'; every batch of the plan once is what counts
            return int(place(out) != {"step": STEPS, "floor": 2 * STEPS, "ahead": []})
        return int(weights(out) != self.whole(layout))


def log(out: Path, rank: int = 0) -> Path:
    """What a run said, or one rank of it."""
    return out.with_name(f"{out.name}.{rank}.log" if rank else f"{out.name}.log")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port


def child(command: list[str], plant: str, err: str, place: dict[str, int]) -> None:
    """In the new process."""
    os.environ |= {key: str(value) for key, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    from dflash.cli import run

    handle = os.open(err, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    if plant:
        install(plant)
    sys.exit(run(command))


def end(process: BaseProcess) -> int:
    process.join(END_S)
    if process.exitcode is None:
        process.kill()
        process.join()
        return -999
    return process.exitcode


def write_data(path: Path) -> None:
    samples = []
    for index in range(24):
        ids = [(3 * index + 5 * spot) % 60 + 1 for spot in range(20 + (index * 7) % 40)]
        samples.append({"input_ids": ids, "loss_mask": [int(spot >= 5) for spot in range(len(ids))]})
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")


def newest(out: Path) -> Path:
    return max((out / "checkpoints").glob("step-*"))


def weights(out: Path) -> bytes:
    return (newest(out) / "state.safetensors").read_bytes()


def place(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((newest(out) / "state.json").read_text(encoding="utf-8"))["progress"]
    return found


def rows(out: Path) -> set[int]:
    """Steps that have a row in metrics.jsonl."""
    found = set()
    for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut short by a kill
        if row["kind"] == "train":
            found.add(row["step"])
    return found


def saves(out: Path, process: BaseProcess) -> None:
    """Wait until a run has written a checkpoint that was not there before, or has ended."""
    before = {path.name for path in (out / "checkpoints").glob("step-*")}
    while process.exitcode is None:
        if {path.name for path in (out / "checkpoints").glob("step-*")} - before:
            return
        time.sleep(0.002)


# -- faults planted in the process ---------------------------------------------------------------------------


class Planted(Exception):
    """A fault on purpose."""


def install(plant: str) -> None:
    """Have the trainer of this process meet a fault after a while."""
    from dflash.pipeline import checkpoint
    from dflash.pipeline.trainer import Trainer

    what, _, where = plant.partition(" ")
    if what == "full":
        real_save, calls = checkpoint.save_file, [0]

        def full(tensors: Any, path: Path) -> None:
            calls[0] += 1
            if where == "always" or calls[0] == 2:
                raise OSError(28, os.strerror(28))
            real_save(tensors, path)

        checkpoint.save_file = full  # type: ignore[assignment]
        return
    run = Trainer.run

    def planted(trainer: Trainer) -> Any:
        owners: dict[str, tuple[Any, str]] = {
            "target": (trainer._targets[0], "taps"),
            "drafter": (trainer.replicas[-1].drafter, "forward"),
            "prefetcher": (trainer.prefetcher, "_collate"),
            "update": (trainer.replicas[0].optimizer, "step"),
        }
        owner, name = owners[where]
        setattr(owner, name, after(getattr(owner, name), FAULTS[what]))
        return run(trainer)

    Trainer.run = planted  # type: ignore[assignment, method-assign]


def after(real: Callable[..., Any], fault: Callable[[], None], calls: int = 12) -> Callable[..., Any]:
    """`real`, and from a later call on the fault instead."""
    left = [calls]

    def call(*arguments: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            fault()
        return real(*arguments, **named)

    return call


def _raise() -> None:
    raise Planted("planted here")


def _out_of_memory() -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (planted)")


FAULTS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "hang": partial(time.sleep, 1e6),
    "memory": _out_of_memory,
}
