"""Scopes, the boundary between host and device on the CPU, places, and who is charged."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint

from dflash.device import Device
from dflash.observe.syncs import NO_SCOPES, allowed_sync, current_scope, mark_step
from steptime.host_memory import PAGEABLE, PINNED, host_kind, mark_host, staged, staging
from steptime.syncs import calls
from steptime.syncs.counting import CountingScopes
from steptime.syncs.scopes import ALLOCATION, BYTES_TO_DEVICE, BYTES_TO_HOST, COPY_TO_HOST, OPERATION, WORK
from tests.waiting import HANG_S


def kinds(scopes: CountingScopes, *, work: bool = False) -> dict[str, int]:
    found: dict[str, int] = {}
    for (_, kind, _), n in scopes.counts().items():
        if work or kind not in WORK:
            found[kind] = found.get(kind, 0) + n
    return found


@pytest.fixture
def scopes() -> CountingScopes:
    made = CountingScopes()
    made.arm()
    return made


def test_place_is_the_line_of_the_program(scopes: CountingScopes) -> None:
    with scopes.enter("drafter/0", Device("cpu")):
        value = torch.ones((), device="cpu:0")
        value.item()
    ((role, kind, place),) = [key for key in scopes.counts() if key[1] not in WORK]
    assert (role, kind, place.function) == ("drafter/0", "item()", "test_place_is_the_line_of_the_program")
    assert place.file == __file__
    assert "value.item()" in Path(__file__).read_text().splitlines()[place.line - 1]


@pytest.mark.parametrize(("where", "copies"), [("cpu:0", 1), ("meta", 0)])
def test_a_device_context_says_where_values_go(scopes: CountingScopes, where: str, copies: int) -> None:
    with scopes.enter("drafter/0", Device("cpu")), torch.device(where):
        torch.tensor([1.0, 2.0])
    assert sum(n for kind, n in kinds(scopes).items() if "copy" in kind) == copies


def test_no_file_of_the_counters_is_a_place() -> None:
    from steptime.syncs.scopes import _skipped_folders

    assert calls.__file__.startswith(tuple(_skipped_folders))


def test_a_wait_of_the_device_object_is_placed_at_its_caller(scopes: CountingScopes) -> None:
    device = Device("cpu")
    event = device.event()
    with scopes.enter("drafter/0", device):
        device.synchronize()
        event.synchronize()
    found = {(kind, place.function) for _, kind, place in scopes.counts() if kind not in WORK}
    name = "test_a_wait_of_the_device_object_is_placed_at_its_caller"
    assert found == {("device synchronize", name), ("event synchronize", name)}


def test_device_is_named_inside_and_restored_behind(scopes: CountingScopes) -> None:
    device = Device("cpu")
    outside = device.torch
    weight = torch.ones(3)
    with scopes.enter("drafter/0", device):
        assert str(device.torch) == "cpu:0"
        assert weight.device == device.torch, "what was made before is on the device"
        assert torch.ones(3).device == torch.device("cpu"), "a factory without a device makes host memory"
        assert (weight + torch.ones((), device=weight.device)).device == device.torch
    assert device.torch is outside
    assert weight.device == torch.device("cpu")
    with pytest.raises(ValueError, match="inside"), scopes.enter("drafter/0", device):
        raise ValueError("inside")
    assert device.torch is outside


def test_a_move_copies_and_keeps_values(scopes: CountingScopes) -> None:
    device = Device("cpu")
    host = device.pinned((4,), torch.float32).copy_(torch.arange(4.0))
    with scopes.enter("drafter/0", device):
        moved = host.to(device.torch, non_blocking=True)
        back = moved.cpu()
        again = moved.to(device.torch)
    assert again is moved
    assert torch.equal(moved, torch.arange(4.0))
    assert len({host.data_ptr(), moved.data_ptr(), back.data_ptr()}) == 3
    assert kinds(scopes, work=True)[BYTES_TO_DEVICE] == kinds(scopes, work=True)[BYTES_TO_HOST] == 16
    assert host_kind(host) == PINNED
    assert host_kind(moved) is None
    assert host_kind(back) == PAGEABLE


def test_conversion_on_the_way_in_is_pageable(scopes: CountingScopes) -> None:
    device = Device("cpu")
    host = device.pinned((4,), torch.float32).zero_()
    with scopes.enter("drafter/0", device):
        assert host.to(device.torch, torch.bfloat16, non_blocking=True).dtype == torch.bfloat16
    assert kinds(scopes) == {"pageable copy": 1}


def test_conversion_on_the_way_out_is_the_devices(scopes: CountingScopes) -> None:
    device = Device("cpu")
    with scopes.enter("drafter/0", device):
        out = torch.ones(4, device=device.torch).to("cpu", torch.bfloat16, non_blocking=True)
    assert out.dtype == torch.bfloat16
    assert kinds(scopes) == {}
    assert kinds(scopes, work=True)[COPY_TO_HOST] == 1


def test_views_are_where_their_base_is(scopes: CountingScopes) -> None:
    device = Device("cpu")
    ring = device.pinned((2, 4), torch.float32)
    with scopes.enter("drafter/0", device):
        ring[1].copy_(torch.ones(4, device=device.torch), non_blocking=True)
        ring[1].view(2, 2).tolist()
    assert kinds(scopes) == {}


def test_from_numpy_is_host_memory(scopes: CountingScopes) -> None:
    device = Device("cpu")
    with scopes.enter("drafter/0", device):
        torch.from_numpy(np.zeros(4)).to(device.torch, non_blocking=True)
    assert kinds(scopes) == {"pageable copy": 1}


def test_host_tensor_in_a_device_operation_is_found(scopes: CountingScopes) -> None:
    device = Device("cpu")
    with scopes.enter("drafter/0", device):
        _ = torch.ones(4, device=device.torch) * torch.ones(4)
        _ = torch.ones(4, device=device.torch) * torch.ones(())
    assert kinds(scopes) == {"host tensor in a device operation": 1}


def test_work_is_counted(scopes: CountingScopes) -> None:
    device = Device("cpu")
    with scopes.enter("drafter/0", device):
        x = torch.empty(4, device=device.torch)
        x.zero_()
        x.view(2, 2).t()
        _ = x + 1
        torch.ones(4)  # host work is nobody's kernel
    assert kinds(scopes, work=True) == {ALLOCATION: 2, OPERATION: 2}


def test_backward_is_charged_to_its_worker_and_hooks_are_seen(scopes: CountingScopes) -> None:
    device = Device("cpu")
    weight = torch.nn.Parameter(torch.ones(3))
    seen: list[Any] = []
    weight.register_hook(lambda gradient: seen.append(gradient.tolist()))
    with scopes.enter("drafter/7", device):
        (weight * 2).sum().backward()
        torch.autograd.grad((weight * 2).sum(), [weight])
    found = {(role, kind): n for (role, kind, _), n in scopes.counts().items() if kind not in WORK}
    assert found == {("drafter/7", "tolist()"): 2}
    assert seen == [[2.0] * 3] * 2


def test_inference_mode_hides_nothing(scopes: CountingScopes) -> None:
    device = Device("cpu")
    with scopes.enter("target/0", device), torch.inference_mode():
        x = torch.ones(4, device=device.torch)
        repeats = torch.ones(4, dtype=torch.int64, device=device.torch)
        torch.repeat_interleave(x, repeats)
        bool(x.sum())
    assert kinds(scopes) == {"repeat_interleave": 1, "truth test": 1}


def test_only_armed_threads_in_scopes_are_counted() -> None:
    scopes = CountingScopes()
    with scopes.enter("drafter/0", Device("cpu")):
        torch.ones((), device="cpu:0").item()
        assert scopes.counts() == {}
        scopes.arm()
        thread = threading.Thread(target=lambda: torch.ones(()).item())
        thread.start()
        thread.join()
        assert scopes.counts() == {}
        torch.ones((), device="cpu:0").item()
        scopes.disarm()
        torch.ones((), device="cpu:0").item()
    assert kinds(scopes) == {"item()": 1}


def test_roles_of_two_threads_stay_apart(scopes: CountingScopes) -> None:
    def work(role: str, times: int) -> None:
        with scopes.enter(role, Device("cpu")):
            for _ in range(times):
                torch.ones((), device="cpu:0").item()

    threads = [threading.Thread(target=work, args=(f"drafter/{index}", 50 + index)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {role: n for (role, kind, _), n in scopes.counts().items() if kind == "item()"}
    assert found == {"drafter/0": 50, "drafter/1": 51, "drafter/2": 52}


def test_counts_by_step(scopes: CountingScopes) -> None:
    with scopes.enter("drafter/0", Device("cpu")):
        value = torch.ones((), device="cpu:0")
        for step in range(5):
            mark_step(step)
            for _ in range(step):
                value.item()
    assert sum(n for (_, kind, _), n in scopes.counts(2, 4).items() if kind == "item()") == 2 + 3


def test_allowed_is_counted_apart_and_nests(scopes: CountingScopes) -> None:
    with scopes.enter("drafter/0", Device("cpu")):
        value = torch.ones((), device="cpu:0")
        with allowed_sync("outer"):
            value.item()
            with allowed_sync("inner"):
                value.item()
            value.item()
    assert kinds(scopes) == {}
    assert sorted(reason for (_, kind, _, reason) in scopes.declared() if kind == "item()") == [
        "inner",
        "outer",
        "outer",
    ]


def test_allowed_in_one_thread_excuses_no_other(scopes: CountingScopes) -> None:
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        with scopes.enter("drafter/1", Device("cpu")), allowed_sync("mine"):
            inside.set()
            done.wait(HANG_S)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(HANG_S)
    with scopes.enter("drafter/0", Device("cpu")):
        torch.ones((), device="cpu:0").item()
    done.set()
    thread.join()
    assert kinds(scopes) == {"item()": 1}


def test_allowed_inside_a_backward_hook(scopes: CountingScopes) -> None:
    weight = torch.nn.Parameter(torch.ones(3))

    def hook(gradient: torch.Tensor) -> None:
        with allowed_sync("debugging"):
            gradient.sum().item()

    weight.register_hook(hook)
    with scopes.enter("drafter/0", Device("cpu")):
        (weight * 2).sum().backward()
    assert kinds(scopes) == {}
    assert [reason for *_, reason in scopes.declared()].count("debugging") >= 1


def test_no_scope_costs_nothing_and_says_nothing() -> None:
    with NO_SCOPES.enter("drafter/0", Device("cpu")):
        assert current_scope() is None
        mark_step(3)
        with allowed_sync("nobody listens"):
            torch.ones(()).item()


def test_entry_points_are_put_back(scopes: CountingScopes) -> None:
    before = (
        torch.cuda.synchronize,
        torch.from_numpy,
        Device.synchronize,
        torch.autograd._engine_run_backward,
    )
    with scopes.enter("drafter/0", Device("cpu")), scopes.enter("drafter/0", Device("cpu")):
        assert torch.cuda.synchronize is not before[0]
    assert (
        torch.cuda.synchronize,
        torch.from_numpy,
        Device.synchronize,
        torch.autograd._engine_run_backward,
    ) == before
    assert calls._users == 0


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: torch.cpu.synchronize(), "device synchronize"),
        (lambda: Device("cpu").synchronize(), "device synchronize"),
        (lambda: Device("cpu").event().synchronize(), "event synchronize"),
        (lambda: torch.cuda.empty_cache(), "empty_cache"),
    ],
)
def test_calls_that_wait_without_an_operator(scopes: CountingScopes, call: Any, kind: str) -> None:
    with scopes.enter("monitor"):
        call()
    assert kinds(scopes) == {kind: 1}


@pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA the call is a real one")
def test_cuda_synchronize_is_found_where_there_is_no_cuda(scopes: CountingScopes) -> None:
    with scopes.enter("drafter/0", Device("cpu")):
        torch.cuda.synchronize()
        torch.cuda.Event.synchronize(None)  # type: ignore[arg-type]
        torch.cuda.Stream.synchronize(None)  # type: ignore[arg-type]
    assert kinds(scopes) == {"device synchronize": 1, "event synchronize": 1, "stream synchronize": 1}


def test_marks_do_not_outlive_their_memory() -> None:
    from steptime import host_memory

    before = len(host_memory._marks)
    for _ in range(3 * host_memory._SWEEP_EVERY):
        mark_host(torch.empty(1), PAGEABLE)
    assert len(host_memory._marks) <= before + host_memory._SWEEP_EVERY + 1


def test_staging_says_what_it_is() -> None:
    assert host_kind(staging((2,), torch.float32, pin=True)) == PINNED
    assert host_kind(staged(torch.zeros(2), pin=False)) == PAGEABLE


def test_checkpointing_and_vmap_run_under_the_modes(scopes: CountingScopes) -> None:
    device = Device("cpu")
    with scopes.enter("drafter/0", device):
        weight = torch.nn.Parameter(torch.ones(3, device=device.torch))
        staging((2,), torch.float32, pin=True)
        loss = torch.utils.checkpoint.checkpoint(lambda x: (x * x).sum(), weight, use_reentrant=False)
        loss.backward()
        torch.vmap(lambda x: x.new_zeros(()) + x)(torch.ones(3, device=device.torch))
    assert weight.grad is not None
    assert kinds(scopes) == {}
