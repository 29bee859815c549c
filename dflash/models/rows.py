"""Which rows a layer projects: all of them, or, in the first layer, the few that differ.

In the first layer every mask slot holds the same vector, so its norm, query, key and value before rotation
are the same: one row stands for all of them. With blocks of B slots that is (B-1)/B of the layer's
projections saved, in both directions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash.models.workspace import Workspace

Spread = list[tuple[slice, torch.Tensor]]
"""Slots of a block, and their states `[batch, anchors, slots, kv_heads, groups, d]`."""


@dataclass(frozen=True, slots=True)
class EveryRow:
    """One projected row for each slot, `[batch*anchors*block, ...]`."""

    batch: int
    anchors: int
    block: int
    kv_heads: int

    def states(self, x: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        """The rows to project, of the layer's input `[batch*anchors*block, H]`."""
        return x

    def spread(self, projected: torch.Tensor) -> Spread:
        """Projected rows `[n, heads, d]` as the slots see them."""
        return [(slice(None), self._by_slot(projected))]

    def gather(self, slots: torch.Tensor, out: torch.Tensor) -> None:
        """The transpose of `spread`: `[batch, anchors, block, kv_heads, groups, d]` summed into `out` `[n,
        heads, d]`."""
        self._by_slot(out).copy_(slots)

    def gathered(self, slots: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        """As `gather`, of contiguous slots, in a buffer or in their own memory: `[n, heads, d]`."""
        return slots.view(-1, slots.shape[3] * slots.shape[4], slots.shape[5])

    def _by_slot(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(self.batch, self.anchors, self.block, self.kv_heads, -1, rows.shape[-1])


@dataclass(frozen=True, slots=True)
class DistinctRows:
    """The anchors' rows and one mask row, `[batch*anchors + 1, ...]`."""

    batch: int
    anchors: int
    block: int
    kv_heads: int

    def states(self, x: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        blocks = x.view(-1, self.block, x.shape[-1])
        rows = workspace.take("distinct", (blocks.shape[0] + 1, x.shape[-1]), x.dtype)
        rows[:-1].copy_(blocks[:, 0])
        rows[-1].copy_(blocks[0, 1])
        return rows

    def spread(self, projected: torch.Tensor) -> Spread:
        mask = projected[-1].view(1, 1, 1, self.kv_heads, -1, projected.shape[-1])
        masks = mask.expand(self.batch, self.anchors, self.block - 1, -1, -1, -1)
        return [(slice(0, 1), self._anchors(projected)), (slice(1, None), masks)]

    def gather(self, slots: torch.Tensor, out: torch.Tensor) -> None:
        self._anchors(out).copy_(slots[:, :, :1])
        out[-1].copy_(slots[:, :, 1:].sum(dim=(0, 1, 2)).view(out.shape[1:]))

    def gathered(self, slots: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        shape = (self.batch * self.anchors + 1, slots.shape[3] * slots.shape[4], slots.shape[5])
        out = workspace.take("gathered", shape, slots.dtype)
        self.gather(slots, out)
        return out

    def _anchors(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:-1].view(self.batch, self.anchors, 1, self.kv_heads, -1, rows.shape[-1])


Rows = EveryRow | DistinctRows
