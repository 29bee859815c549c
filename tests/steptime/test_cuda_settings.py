"""Allocator and determinism: who gets which setting, and that it is given back."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest
import torch

from steptime.cuda_settings import EXPANDABLE, WORKSPACE, deterministic, prefer_expandable_segments

SAY = "import os; print(os.environ.get('PYTORCH_CUDA_ALLOC_CONF'), os.environ.get('PYTORCH_ALLOC_CONF'))"


def said(first: str, **environment: str) -> str:
    """What a fresh process has in its environment after some statements."""
    clean = {key: value for key, value in os.environ.items() if "ALLOC_CONF" not in key}
    done = subprocess.run(
        [sys.executable, "-c", f"{first}; {SAY}"],
        env=clean | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("door", ["dflash.cli", "bench.gate_worker, bench.subjects.trainer.harness"])
def test_whoever_trains_asks_for_expandable_segments(door: str) -> None:
    assert said(f"import {door}") == f"{EXPANDABLE} None"


@pytest.mark.slow
def test_a_program_that_is_only_counted_keeps_its_own_allocator() -> None:
    """`python -m bench syncs` runs the user's program: its allocator is the user's."""
    assert said("import bench.cli, steptime.commands.syncs, steptime.counting.count") == "None None"


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_users_own_setting_stays_under_either_name(name: str) -> None:
    """torch reads the newer name only where the older is not set: writing the older would undo it."""
    mine = {name: "max_split_size_mb:64"}
    prefer_expandable_segments(mine)
    assert mine == {name: "max_split_size_mb:64"}
    empty: dict[str, str] = {}
    prefer_expandable_segments(empty)
    assert empty == {"PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE}


def test_determinism_is_asked_for_inside_and_given_back() -> None:
    environment: dict[str, str] = {}
    cudnn, memory = torch.backends.cudnn, torch.utils.deterministic
    before = cudnn.benchmark, memory.fill_uninitialized_memory
    with contextlib.suppress(KeyError), deterministic(environment):
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert not memory.fill_uninitialized_memory
        assert not cudnn.benchmark
        raise KeyError("in the middle")
    assert environment == {"CUBLAS_WORKSPACE_CONFIG": WORKSPACE}
    assert not torch.are_deterministic_algorithms_enabled()
    assert (cudnn.benchmark, memory.fill_uninitialized_memory) == before
    with deterministic(mine := {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}):
        pass
    assert mine == {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
