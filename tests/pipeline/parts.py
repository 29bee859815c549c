"""Small pieces for the pipeline's tests."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from dflash.data.batch import Batch, BatchSpec
from dflash.pipeline import checkpoint


def make_batch(index: int, *, rows: int = 1, length: int = 8, anchors: int = 1, block: int = 4) -> Batch:
    """A batch with nothing in it but its place in the plan."""
    return Batch(
        spec=BatchSpec(index=index, anchor_seed=index, sample_ids=tuple(range(rows)), bucket=length),
        input_ids=torch.zeros(rows, length, dtype=torch.int64),
        anchors=torch.zeros(rows, anchors, dtype=torch.int64),
        keep=torch.zeros(rows, anchors, dtype=torch.bool),
        labels=torch.zeros(rows, anchors, block - 1, dtype=torch.int64),
        weights=torch.zeros(rows, anchors, block - 1),
        document_start=torch.zeros(rows, anchors, dtype=torch.int64),
        documents=None,
        weight_sum=0.0,
        lengths=(length,) * rows,
        tokens=rows * length,
        padded_tokens=rows * length,
        loss_tokens=0,
        supervised_slots=0,
    )


def reseal(path: Path) -> None:
    """Sums for the files as they are now: what is refused then is refused by the reader itself."""
    names = (checkpoint.WEIGHTS, checkpoint.RECORD)
    sums = [f"{hashlib.sha256((path / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (path / checkpoint.SUMS).write_text("".join(sums))
