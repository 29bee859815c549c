"""A place in the plan -> a batch in host memory: padded ids, anchors, labels, weights, and all counts the
host needs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from dflash.data.anchors import (
    BlockGeometry,
    context_limits,
    document_starts,
    sample_anchors,
    slot_labels,
    visible_pairs,
)
from dflash.data.batch import Batch, BatchSpec, BatchWork, Sample
from dflash.data.dataset import Dataset
from dflash.data.documents import DocumentRows
from steptime.host_memory import staged, staging

PADDING_DOCUMENT = np.iinfo(np.int32).max
"""Document id of padding in packed rows: equal to no document's, and after them all."""


class Collator:
    """Builds batches; equal specs give equal batches.

    Args:
        dataset: where `sample_ids` point into.
        geometry: anchors, block size and decay.
        pin: page-locked tensors where there is CUDA, for copies that do not block. They come from torch's
            caching host allocator, which takes a block back only when the copies out of it are done, so
            nothing is allocated in the long run.
        flops: what a batch asks of a target and of a drafter; None: nobody counts.
        window: width of the drafter's sliding layers, tokens; None where it has none.
    """

    def __init__(
        self,
        dataset: Dataset,
        geometry: BlockGeometry,
        pin: bool = False,
        *,
        flops: Callable[[BatchWork], tuple[int, int]] | None = None,
        window: int | None = None,
    ) -> None:
        self.samples = dataset.samples
        self.geometry = geometry
        self.pin = pin
        self._flops, self._window = flops, window

    def __call__(self, spec: BatchSpec) -> Batch:
        rows = [self.samples[index] for index in spec.sample_ids]
        size, bucket, geometry = len(rows), spec.bucket, self.geometry
        packed = any(row.document_ids is not None for row in rows)
        ids, input_ids = self._new((size, bucket), torch.int64, 0)
        mask = np.zeros((size, bucket), bool)
        documents = np.full((size, bucket), PADDING_DOCUMENT, np.int64) if packed else None
        anchors, anchors_out = self._new((size, geometry.anchors), torch.int64)
        keep, keep_out = self._new((size, geometry.anchors), torch.bool)
        start_places, starts_out = self._new((size, geometry.anchors), torch.int64, 0)
        rng = np.random.default_rng(spec.anchor_seed)
        for place, row in enumerate(rows):
            length = len(row.input_ids)
            ids[place, :length] = row.input_ids
            mask[place, :length] = row.loss_mask
            anchors[place], keep[place] = sample_anchors(
                row.loss_mask, geometry.anchors, rng, row.document_ids, geometry.per_document
            )
            if documents is not None:
                documents[place, :length] = 0 if row.document_ids is None else row.document_ids
                start_places[place] = document_starts(anchors[place], documents[place])
        labels, weights = slot_labels(ids, mask, anchors, keep, geometry, documents)
        lengths = tuple(len(row.input_ids) for row in rows)
        return Batch(
            spec=spec,
            input_ids=input_ids,
            anchors=anchors_out,
            keep=keep_out,
            labels=self._from(labels),
            weights=self._from(weights),
            document_start=starts_out,
            documents=None if documents is None else self._rows(documents),
            weight_sum=float(weights.sum(dtype=np.float64)),
            lengths=lengths,
            tokens=sum(lengths),
            padded_tokens=size * bucket,
            loss_tokens=int(np.count_nonzero(mask)),
            supervised_slots=int(np.count_nonzero(weights)),
            context_limits=context_limits(anchors, keep, start_places, bucket),
            flops=self._count(rows, anchors, keep, start_places),
        )

    def _count(
        self, rows: list[Sample], anchors: np.ndarray, keep: np.ndarray, starts: np.ndarray
    ) -> tuple[int, int]:
        if self._flops is None:
            return 0, 0
        size, window = self.geometry.block_size, self._window
        pairs = visible_pairs(anchors, keep, starts, size)
        sliding = 0 if window is None else visible_pairs(anchors, keep, starts, size, window)
        lengths = tuple(length for row in rows for length in _document_lengths(row))
        return self._flops(BatchWork(lengths, int(np.count_nonzero(keep)), pairs, sliding))

    def _new(
        self, shape: tuple[int, ...], dtype: torch.dtype, fill: int | None = None
    ) -> tuple[np.ndarray, torch.Tensor]:
        tensor = staging(shape, dtype, pin=self.pin)
        array = tensor.numpy()
        if fill is not None:
            array.fill(fill)
        return array, tensor

    def _rows(self, documents: np.ndarray) -> DocumentRows:
        rows = DocumentRows.split(documents)
        return DocumentRows(staged(rows.gather, pin=self.pin), staged(rows.scatter, pin=self.pin))

    def _from(self, array: np.ndarray) -> torch.Tensor:
        return staged(torch.from_numpy(array), pin=self.pin)


def _document_lengths(row: Sample) -> tuple[int, ...]:
    if row.document_ids is None:
        return (len(row.input_ids),)
    return tuple(int(count) for count in np.bincount(row.document_ids))
