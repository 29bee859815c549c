"""Who marks what it stages: a process without CUDA, and one in which a counter of CPU workers has asked."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from steptime import host_memory
from steptime.host_memory import PAGEABLE, PINNED, host_kind, mark_host, staged, staging
from steptime.syncs.counting import CountingScopes


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with CUDA, whose pinned memory is plain memory here, and on which nobody has asked."""
    empty = torch.empty
    monkeypatch.setattr(host_memory, "_has_cuda", lambda: True)
    monkeypatch.setattr(host_memory, "_asked", False)
    monkeypatch.setattr(host_memory, "_marks", {})
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    with mock.patch.object(torch, "empty", lambda shape, dtype, pin_memory: empty(shape, dtype=dtype)):
        yield


def made() -> list[torch.Tensor]:
    return [
        staging((2,), torch.int64, pin=True),
        staged(torch.ones(2), pin=True),
        staging((2,), torch.int64, pin=False),
        staged(torch.ones(2), pin=False),
    ]


def test_without_cuda_all_that_is_staged_is_marked() -> None:
    assert [host_kind(tensor) for tensor in made()] == [PINNED, PINNED, PAGEABLE, PAGEABLE]


def test_on_cuda_nothing_is_written_down(on_cuda: None) -> None:
    for _ in range(3):
        made()
    CountingScopes(cuda=True)
    made()
    assert host_memory._marks == {}


@pytest.mark.parametrize("cuda", [False, None])
def test_a_counter_of_cpu_workers_has_the_marks_made(on_cuda: None, cuda: bool | None) -> None:
    CountingScopes(cuda=cuda)
    assert [host_kind(tensor) for tensor in made()] == [PINNED, PINNED, PAGEABLE, PAGEABLE]


def test_an_explicit_mark_is_always_made(on_cuda: None) -> None:
    assert host_kind(mark_host(torch.ones(2), PINNED)) == PINNED
