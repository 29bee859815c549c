"""Rows of different lengths in one tensor: right-aligned, so that the newest token of every row stands last.

Every row of a batch commits another number of tokens in each cycle. Columns are then moved per row, so that
all rows end in the same column again; what stands left of a row's first token is padding that a mask hides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def kept_columns(
    length: int, kept: Sequence[int], new_length: int, device: torch.device
) -> torch.Tensor | None:
    """Which old column each new one comes from, after `kept[r]` of the columns from `length` on were
    committed.

    Args:
        length: columns before the pass; rows are right-aligned in them.
        kept: committed columns of each row, from `length` on.
        new_length: columns afterwards: the longest row's tokens.

    Returns:
        int64 `[rows, new_length]`, or None when all rows agree and the first `new_length` columns are the
        answer.
    """
    shifts = [length + count - new_length for count in kept]
    if not any(shifts):
        return None
    columns = torch.arange(new_length, device=device) + torch.tensor(shifts, device=device)[:, None]
    return columns.clamp_(min=0)


def take_columns(
    tensor: torch.Tensor, columns: torch.Tensor | None, new_length: int, dim: int
) -> torch.Tensor:
    """`tensor` with only the columns of `kept_columns` along `dim` (rows are dim 0)."""
    if columns is None:
        return tensor.narrow(dim, 0, new_length)
    shape = [1] * tensor.dim()
    shape[0], shape[dim] = columns.shape
    size = list(tensor.shape)
    size[dim] = new_length
    return tensor.gather(dim, columns.view(shape).expand(size))


def padding_mask(lengths: Sequence[int], columns: int, device: torch.device) -> torch.Tensor | None:
    """bool `[rows, columns]`: true where a row has a token; None when no row is padded."""
    if min(lengths) == columns:
        return None
    starts = torch.tensor([columns - length for length in lengths], device=device)
    return torch.arange(columns, device=device) >= starts[:, None]
