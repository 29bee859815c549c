"""What the stages run: the small trainer with its workers on the GPUs, and a drafter of a size that keeps one
busy."""

from __future__ import annotations

import json
from pathlib import Path

from bench.peers.speed import Shape
from dflash.config import Config, load_config
from steptime.child_process import ROOT
from steptime.run_files import write

CONFIG = ROOT / "configs" / "cpu-tiny.toml"
DATA = ROOT / "cache" / "gpu-check"
MOST_DRAFTERS = 2
SAMPLES = 192
MASK = 4095
"""The last token of the small target's vocabulary; no sample has it."""

SHAPE = Shape(
    hidden=2048,
    intermediate=6144,
    layers=4,
    heads=16,
    kv_heads=8,
    head_dim=128,
    vocab=32768,
    batch=2,
    context=2048,
    anchors=128,
    block=16,
    taps=4,
    dtype="bf16",
)
"""A drafter of a target with hidden size 2048: 4096 block rows a step."""


def devices(gpus: int) -> list[str]:
    """`--set` of the workers: the target on the first GPU, drafters on the others, everything on one where
    there is but one."""
    drafters = [f"cuda:{index}" for index in range(1, min(gpus, 1 + MOST_DRAFTERS))] or ["cuda:0"]
    listed = ", ".join(f'"{name}"' for name in drafters)
    return ['target.devices=["cuda:0"]', f"drafter.devices=[{listed}]"]


def data(folder: Path = DATA) -> list[str]:
    """`--set` of the data: token ids that are made here, and one bucket. No stage's time goes into a
    tokenizer, or into a compile for each of several shapes."""
    path = folder / "ids.jsonl"
    rows = [json.dumps(_sample(index)) for index in range(SAMPLES)]
    folder.mkdir(parents=True, exist_ok=True)
    write(path, "\n".join(rows) + "\n")
    return [
        f"data.path={path}",
        f"data.cache={folder}",
        "data.buckets=[256]",
        f"drafter.mask_token_id={MASK}",
    ]


def _sample(index: int) -> dict[str, list[int]]:
    length = 100 + 37 * index % 150
    ids = [(31 * index + 17 * place + place * place) % MASK for place in range(length)]
    return {"input_ids": ids, "loss_mask": [int(place >= 10) for place in range(length)]}


def settings(gpus: int) -> list[str]:
    """`--set` of the small trainer."""
    return [*devices(gpus), *data()]


def trainer_config(*more: str) -> Config:
    """The small trainer on this machine's GPUs."""
    import torch

    return load_config(str(CONFIG), [*settings(torch.cuda.device_count()), *more])
