"""The flat AdamW against torch's, with clipping; masters, and a state that does not depend on the layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dflash.models.optimizer
from dflash.models.optimizer import FlatAdamW, FlatParameters
from steptime.syncs.counting import CountingScopes, PlainDevice
from steptime.syncs.scopes import ALLOCATION, COPY_TO_HOST, OPERATION
from tests.models.watch import watch

CPU = torch.device("cpu")


def small_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 5, bias=False))


def set_gradients(module: nn.Module, seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        gradient = torch.randn(parameter.shape, generator=generator) * size
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.copy_(gradient)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("size", [1e-3, 3.0])
def test_equals_torch_adamw_behind_a_clip(weight_decay, size):
    theirs, ours = small_module(), small_module()
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=weight_decay)
    flat = FlatParameters(ours, CPU, torch.float32)
    optimizer = FlatAdamW(flat, betas=(0.9, 0.95), weight_decay=weight_decay, clip=1.0)
    for step in range(6):
        lr = 1e-2 * (step + 1)
        set_gradients(theirs, step, size)
        set_gradients(ours, step, size)
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        reference.param_groups[0]["lr"] = lr
        reference.step()
        assert float(optimizer.step(lr)) == pytest.approx(float(norm), rel=1e-5)
        for one, two in zip(theirs.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-7)


def test_grad_scale_acts_before_the_clip():
    one, two = small_module(), small_module()
    steps = []
    for module, factor, scale in ((one, 1.0, 1.0), (two, 4.0, 0.25)):
        optimizer = FlatAdamW(FlatParameters(module, CPU, torch.float32))
        set_gradients(module, 0, factor)
        steps.append(float(optimizer.step(1e-2, scale)))
    assert steps[0] == pytest.approx(steps[1], rel=1e-6)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_step_without_weight_changes_nothing():
    module = small_module()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    optimizer = FlatAdamW(FlatParameters(module, CPU, torch.float32))
    set_gradients(module, 0, 1.0)
    assert float(optimizer.step(1e-2, 0.0)) == 0.0
    for one, two in zip(before, module.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_bfloat16_keeps_float32_masters():
    module = small_module()
    flat = FlatParameters(module, CPU, torch.bfloat16)
    optimizer = FlatAdamW(flat, clip=1e9)
    start = flat.master.clone()
    used = [slice(place, place + shape.numel()) for place, shape in flat.places.values()]
    for _ in range(50):
        set_gradients(module, 0, 1.0)
        optimizer.step(1e-6)
    moved = torch.cat([(flat.master - start)[part] for part in used]).abs()
    # Each step moves 1e-6: far below what bfloat16 resolves, kept by the masters.
    assert moved.min() > 4e-5
    assert torch.equal(flat.working, flat.master.bfloat16())
    assert next(module.parameters()).dtype == torch.bfloat16


def test_float32_weights_are_their_own_masters():
    flat = FlatParameters(small_module(), CPU, torch.float32)
    assert flat.master is flat.working


def test_gradients_accumulate_in_place_and_are_cleared_together():
    module = small_module()
    flat = FlatParameters(module, CPU, torch.float32)
    address = flat.grad.data_ptr()
    for _ in range(2):
        module(torch.ones(3, 7)).sum().backward()
    assert flat.grad.data_ptr() == address
    assert all(parameter.grad.data_ptr() >= address for parameter in module.parameters())
    assert flat.grad.abs().sum() > 0
    flat.zero_grad()
    assert not any(parameter.grad.any() for parameter in module.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_resumes_exactly(dtype):
    def trained(steps, optimizer, module, first=0):
        for step in range(first, first + steps):
            set_gradients(module, step, 1.0)
            optimizer.step(1e-2)

    straight = small_module()
    flat = FlatParameters(straight, CPU, dtype)
    optimizer = FlatAdamW(flat)
    trained(3, optimizer, straight)
    state = {
        key: value.clone() if isinstance(value, torch.Tensor) else dict(value)
        for key, value in optimizer.state_dict().items()
    }
    trained(3, optimizer, straight, first=3)
    resumed = small_module()
    other = FlatParameters(resumed, CPU, dtype)
    again = FlatAdamW(other)
    again.load_state_dict(state)
    trained(3, again, resumed, first=3)
    assert torch.equal(flat.master, other.master)
    assert torch.equal(flat.working, other.working)
    assert set(state["master"]) == {name for name, _ in resumed.named_parameters()}


def test_pieces_of_a_large_gradient_give_the_same_step(monkeypatch):
    found = []
    for piece in (1 << 26, 100):
        monkeypatch.setattr(dflash.models.optimizer, "_PIECE", piece)
        module = small_module()
        flat = FlatParameters(module, CPU, torch.bfloat16)
        optimizer = FlatAdamW(flat)
        set_gradients(module, 0, 1.0)
        norm = float(optimizer.step(1e-2))
        found.append((norm, flat.master.clone()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-6, atol=1e-8)


def test_a_step_is_a_handful_of_operations_and_reads_nothing():
    many = nn.ModuleList(nn.Linear(4, 4) for _ in range(40))
    optimizer = FlatAdamW(FlatParameters(many, CPU, torch.bfloat16))
    with watch() as seen:
        optimizer.step(1e-3)
    assert not seen.reads
    assert len(seen.shapes) < 15


def test_its_state_is_read_without_memory_of_the_device():
    """The plan of a GPU's memory (`--dry-run`) holds masters and moments once."""
    device = PlainDevice("cpu")
    scopes = CountingScopes(cuda=False)
    module = small_module()
    with scopes.enter("drafter/0", device):
        flat = FlatParameters(module, device.torch, torch.bfloat16)
        optimizer = FlatAdamW(flat)
        scopes.arm()
        state = optimizer.state_dict()
        scopes.disarm()
    kinds = {kind for _, kind, _ in scopes.counts()}
    assert COPY_TO_HOST in kinds
    assert not kinds & {ALLOCATION, OPERATION}
    flat.master.fill_(7.0)
    assert not any((tensor == 7.0).any() for tensor in state["master"].values()), "copies, not views"


def test_micro_batches_add_up_in_float32():
    """Sixteen gradients of which each is lost in a bfloat16 sum of the ones before it."""
    parts = [torch.full((38,), value) for value in (1.0, *[2.0**-10] * 15)]
    exact = torch.stack(parts).sum(dim=0)
    found = {}
    for wide in (False, True):
        module = nn.Linear(37, 1, bias=True)
        flat = FlatParameters(module, CPU, torch.bfloat16)
        if wide:
            flat.sum_wide()
        for _ in range(2):  # the second step knows nothing of the first
            flat.zero_grad()
            for index, part in enumerate(parts):
                flat.view(flat.grad, "weight").add_(part[:37])
                flat.end_micro_batch(last=index == 15)
        found[wide] = flat.view(flat.grad, "weight").float()
    assert torch.equal(found[True][0], exact[:37].bfloat16().float())
    assert torch.equal(found[False][0], torch.ones(37)), "bfloat16 keeps them too: nothing is shown"


def test_float32_gradients_need_no_sum_beside_them():
    flat = FlatParameters(small_module(), CPU, torch.float32)
    flat.sum_wide()
    assert flat.wide_sum is None
    flat.grad.fill_(2.0)
    flat.end_micro_batch(last=False)
    assert torch.equal(flat.grad, torch.full_like(flat.grad, 2.0))
