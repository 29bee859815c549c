"""Packed rows taken apart, so that every document runs through the target as if alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class DocumentRows:
    """Packed rows taken apart: every document in a row of its own, and the way back. Made on the host.

    Attributes:
        gather: int64 `[documents, longest]` places in the flattened batch; past a document's end, its last
            place again.
        scatter: int64 `[batch * length]` places in the flattened rows.
    """

    gather: torch.Tensor
    scatter: torch.Tensor

    @staticmethod
    def split(document_ids: np.ndarray) -> DocumentRows:
        """From int `[batch, length]` document ids, ascending within a row; any value on padding."""
        batch, length = document_ids.shape
        starts = np.ones((batch, length), bool)
        starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
        first = np.flatnonzero(starts)
        sizes = np.diff(np.append(first, batch * length))
        offsets = np.arange(sizes.max())
        gather = first[:, None] + np.minimum(offsets, sizes[:, None] - 1)
        row = np.cumsum(starts) - 1
        scatter = row * len(offsets) + np.arange(batch * length) - first[row]
        return DocumentRows(torch.from_numpy(gather), torch.from_numpy(scatter))

    def to(self, device: torch.device) -> DocumentRows:
        """On `device`; from pinned memory without a wait."""
        return DocumentRows(
            self.gather.to(device, non_blocking=True), self.scatter.to(device, non_blocking=True)
        )
