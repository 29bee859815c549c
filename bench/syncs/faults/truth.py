"""The truth table: operations of which it is known whether the host waits on a GPU.

The first part follows PyTorch's own list of expected and unexpected warnings (`test_sync_warning` in its
`test_torch.py`); the second adds copies, constructors and Python reads, from CUDA's rules on which copies
return early.

    python -m bench.syncs.faults.truth WAY        in a process of its own: JSON {case: {kind: count}}
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from bench.syncs.ways.registry import make_way
from steptime.counting.cuda import is_sync, plain
from steptime.counting.difference import Counts
from steptime.counting.ways.way import Way
from steptime.errors import UserError
from steptime.host_memory import staging

SIZE = 4


def _set(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    x[index] = value
    return x


@dataclass(frozen=True)
class Case:
    """One operation.

    Attributes:
        waits: whether the host waits for the device.
        act: gets the operands of `operands`.
        upstream: PyTorch's own test has it.
    """

    name: str
    waits: bool
    act: Callable[[Any], object]
    upstream: bool = False


_UPSTREAM: dict[str, tuple[bool, Callable[[Any], object]]] = {
    "number into a device mask": (False, lambda o: _set(o.x, o.mask, 1.0)),
    "tensor into a host mask": (False, lambda o: _set(o.x, o.host_mask, o.y)),
    "tensor into a device index": (False, lambda o: _set(o.x, o.index, o.y)),
    "read by host mask": (False, lambda o: o.x[o.host_mask]),
    "read by device index": (False, lambda o: o.x[o.index]),
    "one_hot with classes": (False, lambda o: F.one_hot(o.index, num_classes=SIZE)),
    "randperm": (False, lambda o: torch.randperm(20000, device=o.device)),
    "repeat_interleave by a number": (False, lambda o: torch.repeat_interleave(o.x, 2, output_size=2 * SIZE)),
    "repeat_interleave with output_size": (
        False,
        lambda o: torch.repeat_interleave(o.x, o.repeats, output_size=2 * SIZE),
    ),
    "any": (False, lambda o: torch.any(o.y)),
    "tensor into a device mask": (True, lambda o: _set(o.x, o.mask, o.y)),
    "tensor into a host index": (True, lambda o: _set(o.x, o.host_index, o.y)),
    "read by device mask": (True, lambda o: o.x[o.mask]),
    "read by host index": (True, lambda o: o.x[o.host_index]),
    "nonzero": (True, lambda o: o.x.nonzero()),
    "truth test": (True, lambda o: 1 if o.y else 2),
    "one_hot without classes": (True, lambda o: F.one_hot(o.index)),
    "repeat_interleave without output_size": (True, lambda o: torch.repeat_interleave(o.x, o.repeats)),
}

_OURS: dict[str, tuple[bool, Callable[[Any], object]]] = {
    "item": (True, lambda o: o.y.item()),
    "float": (True, lambda o: float(o.y)),
    "int": (True, lambda o: int(o.y)),
    "tolist": (True, lambda o: o.x.tolist()),
    "cpu": (True, lambda o: o.x.cpu()),
    "to cpu": (True, lambda o: o.x.to("cpu")),
    "format": (True, lambda o: f"{o.y:.3f}"),
    "print": (True, lambda o: str(o.x)),
    "equal": (True, lambda o: torch.equal(o.x, o.x)),
    "masked_select": (True, lambda o: torch.masked_select(o.x, o.mask)),
    "unique": (True, lambda o: torch.unique(o.index)),
    "bincount": (True, lambda o: torch.bincount(o.index)),
    "where with one argument": (True, lambda o: torch.where(o.mask)),
    "index by a device number": (True, lambda o: o.x[o.index[0]]),
    "index by a list": (True, lambda o: o.x[[0, 2]]),
    "arange to a device number": (True, lambda o: torch.arange(o.index[0], device=o.device)),
    "tensor from a number": (True, lambda o: torch.tensor(3.0, device=o.device)),
    "tensor from an array": (True, lambda o: torch.as_tensor(np.zeros(SIZE), device=o.device)),
    "blocking copy in from pinned memory": (True, lambda o: o.pinned.to(o.device)),
    "blocking copy out to pinned memory": (True, lambda o: o.pinned.copy_(o.x)),
    "clip_grad_norm_ that checks": (
        True,
        lambda o: torch.nn.utils.clip_grad_norm_([o.leaf], 1.0, error_if_nonfinite=True),
    ),
    "in a backward hook": (True, lambda o: (o.hooked * o.hooked).sum().backward()),
    "full": (False, lambda o: torch.full((), 3.0, device=o.device)),
    "masked_fill": (False, lambda o: o.x.masked_fill(o.mask, 0.0)),
    "where with three arguments": (False, lambda o: torch.where(o.mask, o.x, 0.0)),
    "slice": (False, lambda o: o.x[1:3]),
    "index by a Python number": (False, lambda o: o.x[2]),
    "number into an element": (False, lambda o: _set(o.x, 2, 5.0)),
    "asynchronous copy in from pinned memory": (False, lambda o: o.pinned.to(o.device, non_blocking=True)),
    "asynchronous copy out to pinned memory": (False, lambda o: o.pinned.copy_(o.x, non_blocking=True)),
    "asynchronous to cpu": (False, lambda o: o.x.to("cpu", non_blocking=True)),
    "to the same device": (False, lambda o: o.x.to(o.device)),
    "copy on the device": (False, lambda o: o.x.clone().copy_(o.x)),
    "reading host memory": (False, lambda o: (o.pinned.sum().item(), o.pinned.tolist())),
    "clip_grad_norm_": (False, lambda o: torch.nn.utils.clip_grad_norm_([o.leaf], 1.0)),
    "backward": (False, lambda o: (o.leaf * o.leaf).sum().backward()),
    "fused optimizer step": (False, lambda o: o.optimizer.step()),
    "item on a host scalar": (False, lambda o: o.host_mask.sum().item()),
}

_PAGEABLE: dict[str, tuple[bool, Callable[[Any], object]]] = {
    "asynchronous copy in from pageable memory": (True, lambda o: o.pageable.to(o.device, non_blocking=True)),
    "asynchronous copy out to pageable memory": (True, lambda o: o.pageable.copy_(o.x, non_blocking=True)),
    "asynchronous copy out to gapped memory": (True, lambda o: o.gapped.copy_(o.x, non_blocking=True)),
    "asynchronous copy of permuted pinned memory": (
        False,
        lambda o: o.permuted.to(o.device, non_blocking=True),
    ),
    "asynchronous copy of nothing": (False, lambda o: o.pageable[:0].to(o.device, non_blocking=True)),
}

CASES = tuple(
    Case(name, waits, act, upstream=table is _UPSTREAM)
    for table in (_UPSTREAM, _OURS, _PAGEABLE)
    for name, (waits, act) in table.items()
)
PAGEABLE_CASES = frozenset(_PAGEABLE)
"""Cases whose waits are copies that no synchronisation call tells of."""


def operands(device: torch.device) -> SimpleNamespace:
    """Small tensors on `device` and on the host. Called inside an armed scope, so that the modes know which
    is where."""
    x = torch.rand(SIZE, device=device)
    leaf = torch.nn.Parameter(torch.ones(SIZE, device=device))
    leaf.grad = torch.ones(SIZE, device=device)
    hooked = torch.nn.Parameter(torch.ones(SIZE, device=device))
    hooked.register_hook(_read_in_hook)
    wide = staging((SIZE, 2), torch.float32, pin=True).fill_(1.0)
    return SimpleNamespace(
        device=device,
        x=x,
        y=torch.rand((), device=device),
        index=torch.full((3,), 1, dtype=torch.int64, device=device),
        mask=torch.ones(SIZE, dtype=torch.bool, device=device),
        repeats=torch.full((1,), 2, dtype=torch.int64, device=device),
        host_index=staging((3,), torch.int64, pin=False).fill_(1),
        host_mask=staging((SIZE,), torch.bool, pin=False).fill_(True),
        pinned=staging((SIZE,), torch.float32, pin=True).fill_(1.0),
        pageable=staging((SIZE,), torch.float32, pin=False).fill_(1.0),
        gapped=wide[:, 0],
        permuted=wide.t(),
        leaf=leaf,
        hooked=hooked,
        optimizer=torch.optim.AdamW([leaf], fused=True),
    )


def _read_in_hook(gradient: torch.Tensor) -> None:
    gradient.sum().item()


def syncs_of(way: Way, case: Case) -> dict[str, int]:
    """Kinds of syncs that a way counts in one case, after the case was run once to warm up."""
    with way.arm("drafter/0"):
        found = operands(scope_device(way))
        case.act(found)
        found = operands(scope_device(way))
        before = way.counts()
        case.act(found)
        after = way.counts()
    return _kinds(after, before)


def scope_device(way: Way) -> torch.device:
    """The device as a program inside the way's scope must name it."""
    if way.device == "cpu":
        return torch.device("cpu", 0)
    return torch.device(way.device)


def _kinds(after: Counts, before: Counts) -> dict[str, int]:
    found: dict[str, int] = {}
    for key, n in after.items():
        if is_sync(key[1]) and n > before.get(key, 0):
            found[plain(key[1])] = found.get(plain(key[1]), 0) + n - before.get(key, 0)
    return found


def main(argv: Sequence[str]) -> int:
    """Print what one way counts in every case; the way runs on CUDA where it can."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        way = make_way(argv[0], device)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if (reason := way.available()) is not None:
        print(f"error: {way.name}: unavailable: {reason}", file=sys.stderr)
        return 4
    print(json.dumps({case.name: syncs_of(way, case) for case in CASES}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
