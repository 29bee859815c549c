"""What only a GPU can show: flex attention with its backward, compiled pieces, and that no operation of a
step waits."""

from __future__ import annotations

import pytest
import torch

from dflash.models.objectives.ce import CrossEntropy
from dflash.models.optimizer import FlatAdamW
from tests.models.cases import Case, flatten, gradients, loss_of, make_case, make_drafter, run

pytestmark = pytest.mark.gpu
SIZES = {"hidden_size": 64, "head_dim": 32, "block_size": 8}


def on_gpu(case: Case) -> Case:
    names = (
        "input_ids",
        "features",
        "anchors",
        "keep",
        "document_start",
        "labels",
        "weights",
        "embedding",
        "head",
    )
    return case.changed(**{name: getattr(case, name).cuda() for name in names})


@pytest.mark.parametrize("attention", ["flex", "split", "dense"])
@pytest.mark.parametrize("compile", [False, True])
def test_gradients_equal_the_cpus(attention, compile):
    reference = make_drafter(attention="dense", sliding_layers=1, sliding_window=9, **SIZES)
    case = make_case(reference.shape, dropped=True, documents=True)
    expected_loss = loss_of(run(reference, case), case)
    expected_loss.backward()
    drafter = make_drafter(attention=attention, compile=compile, sliding_layers=1, sliding_window=9, **SIZES)
    flatten(drafter, torch.device("cuda"), torch.float32)
    moved = on_gpu(case)
    loss = loss_of(run(drafter, moved), moved)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(expected_loss.detach()), rel=1e-3)
    found = gradients(drafter)
    for name, gradient in gradients(reference).items():
        error = float((found[name].cpu() - gradient).norm() / gradient.norm())
        assert error < 2e-2, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("attention", ["flex", "split"])
def test_a_step_waits_for_nothing(attention):
    drafter = make_drafter(attention=attention, **SIZES)
    flat = flatten(drafter, torch.device("cuda"), torch.bfloat16)
    optimizer, objective = FlatAdamW(flat), CrossEntropy()
    case = make_case(drafter.shape)
    scale, limits, moved = case.scale, case.limits, on_gpu(case)
    features, embedding, head = (
        tensor.bfloat16() for tensor in (moved.features, moved.embedding, moved.head)
    )

    def step() -> None:
        places = (moved.anchors, moved.keep, moved.document_start)
        hidden = drafter(features, moved.input_ids, *places, embedding, limits)
        objective(hidden, head, moved.labels, moved.weights, scale)[0].backward()
        optimizer.step(1e-3)
        flat.zero_grad()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
