"""How CUDA is asked to start and to compute: settings that a process makes once, before its first CUDA call.

What torch does with them is read in torch 2.13's headers and sources, not measured."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, MutableMapping
from typing import Any

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""torch reads the first of them that is set, when CUDA's allocator is first used (CUDAAllocatorConfig.h)."""
EXPANDABLE = "expandable_segments:True"
WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACE = ":4096:8"
"""One of the two values under which cuBLAS gives equal bits on several streams (its documentation)."""


def prefer_expandable_segments(environment: MutableMapping[str, str] = os.environ) -> None:
    """Ask CUDA's allocator for segments that grow, unless the user has set the allocator himself. Child
    processes inherit it."""
    if not any(name in environment for name in ALLOCATOR_VARIABLES):
        environment[ALLOCATOR_VARIABLES[0]] = EXPANDABLE


@contextlib.contextmanager
def deterministic(environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Equal inputs give equal bits inside, as far as torch can promise it: for comparing losses, never for
    timing.

    An operation that has no deterministic kernel warns once and runs. cuBLAS reads its variable when it makes
    its first workspace, so enter this before the process uses CUDA. The variable stays afterwards, for the
    workspaces do.
    """
    import torch

    if WORKSPACE_VARIABLE not in environment:
        environment[WORKSPACE_VARIABLE] = WORKSPACE
    cudnn = torch.backends.cudnn
    memory: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        memory.fill_uninitialized_memory,
        cudnn.benchmark,
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling every `torch.empty` would be an operation of its own, and counted as one.
    memory.fill_uninitialized_memory = False
    cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = before[2]
        cudnn.benchmark = before[3]
