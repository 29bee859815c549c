"""The written-out pass against the modules under automatic differentiation, gradient by gradient."""

from __future__ import annotations

import dataclasses
import importlib.util
import random
from itertools import combinations

import pytest
import torch

from dflash.models import elementwise, elementwise_compiled
from dflash.models.drafter import Drafter
from dflash.models.elementwise_compiled import compiled
from dflash.models.objectives.ce import CrossEntropy
from dflash.models.optimizer import FlatParameters
from dflash.models.stack import Stack
from dflash.models.workspace import Workspace
from tests.models.cases import Case, flatten, gradients, loss_of, make_case, make_drafter, run
from tests.models.watch import watch
from tests.pipeline.run import small_trainer

CPU = torch.device("cpu")
LAYERS = {
    "full": {"sliding_layers": 0},
    "sliding": {"sliding_layers": 3, "sliding_window": 9},
    "mixed": {"sliding_layers": 2, "sliding_window": 9},
    "wide window": {"sliding_layers": 2, "sliding_window": 500},
    "one key head": {"kv_heads": 1},
    "a key head each": {"kv_heads": 4},
    "one layer": {"layers": 1},
}


def by_modules(case: Case, **changes) -> tuple[float, dict[str, torch.Tensor]]:
    drafter = make_drafter(attention="dense", **changes)
    loss = loss_of(run(drafter, case), case)
    loss.backward()
    return float(loss.detach()), gradients(drafter)


def by_stack(case: Case, dtype=torch.float32, limits=None, attention="split", passes=1, **changes):
    drafter = make_drafter(attention=attention, **changes)
    flat = flatten(drafter, CPU, dtype)
    assert drafter.stack is not None
    for _ in range(passes):
        loss = loss_of(run(drafter, case, dtype, limits), case)
        loss.backward()
    return float(loss.detach()), gradients(drafter), flat


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        error = (found[name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        assert error < tolerance, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("changes", LAYERS.values(), ids=LAYERS)
def test_equals_the_modules(changes, limited):
    case = make_case()
    loss, expected = by_modules(case, **changes)
    found_loss, found, _ = by_stack(case, limits=case.limits if limited else None, **changes)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_same(found, expected, 1e-5)


@pytest.mark.parametrize(
    "kind", [{"dropped": True}, {"documents": True}, {"batch": 1}, {"batch": 3, "anchors": 7}], ids=str
)
def test_equals_the_modules_on_odd_batches(kind):
    case = make_case(**kind)
    loss, expected = by_modules(case, sliding_layers=1, sliding_window=9)
    found_loss, found, _ = by_stack(case, limits=case.limits, sliding_layers=1, sliding_window=9)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_same(found, expected, 1e-5)


def test_any_attention_serves_through_an_island():
    case = make_case()
    loss, expected = by_modules(case)
    found_loss, found, _ = by_stack(case, attention="dense")
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_same(found, expected, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)])
def test_compiled_pieces_give_the_same(dtype, monkeypatch):
    """Traced as for a GPU, run by torch's own operations: code generation is torch's to test, and takes
    minutes here."""
    monkeypatch.setattr(elementwise_compiled, "compiled", lambda device: compiled(device, "aot_eager"))
    case = make_case()
    loss, expected = by_modules(case, sliding_layers=1, sliding_window=9)
    found_loss, found, _ = by_stack(
        case, dtype, case.limits, compile=True, sliding_layers=1, sliding_window=9
    )
    exact = dtype == torch.float32
    assert found_loss == pytest.approx(loss, rel=1e-6 if exact else 5e-3)
    assert_same(found, expected, 1e-5 if exact else 6e-2)


def test_auto_compiles_on_a_gpu_with_triton_only(monkeypatch):
    made = object()
    monkeypatch.setattr(elementwise_compiled, "compiled", lambda device: made)
    operations = elementwise_compiled.operations
    for there, expected in ((object(), made), (None, elementwise)):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, there=there: there)
        assert operations("auto", torch.device("cuda", 0)) is expected
        assert operations("auto", CPU) is elementwise
    assert operations(True, CPU) is made
    assert operations(False, torch.device("cuda", 0)) is elementwise


def test_gradients_add_up_over_passes():
    case = make_case()
    _, once, _ = by_stack(case)
    _, twice, _ = by_stack(case, passes=2)
    assert_same(twice, {name: 2 * gradient for name, gradient in once.items()}, 1e-5)


def test_bfloat16_stays_near_float32():
    case = make_case()
    loss, expected = by_modules(case)
    found_loss, found, flat = by_stack(case, dtype=torch.bfloat16, limits=case.limits)
    assert flat.grad.dtype == torch.bfloat16
    assert found_loss == pytest.approx(loss, rel=5e-3)
    assert_same(found, expected, 6e-2)


def test_two_passes_give_the_same_bits():
    case = make_case()
    _, first, _ = by_stack(case, limits=case.limits)
    _, second, _ = by_stack(case, limits=case.limits)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_second_forward_before_the_backward_is_refused():
    case, drafter = make_case(), make_drafter(attention="split")
    flatten(drafter, CPU, torch.float32)
    first = run(drafter, case)
    with pytest.raises(RuntimeError, match="a forward came before the last backward"):
        run(drafter, case)
    del first
    loss_of(run(drafter, case), case).backward()
    loss = loss_of(run(drafter, case), case)
    run(drafter, case)
    with pytest.raises(RuntimeError, match="run backward before the next forward"):
        loss.backward()


def rename(monkeypatch, renamed) -> None:
    """Every buffer is taken by the name that `renamed` gives for its own."""
    take = Workspace.take
    monkeypatch.setattr(Workspace, "take", lambda self, name, *rest: take(self, renamed(name), *rest))


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("attention", ["split", "dense"])
def test_a_name_used_twice_is_found_or_does_no_harm(monkeypatch, attention):
    """Two buffers under one name: an error in the first pass, or the same bits as one was free by then."""
    case = make_case()

    def train():
        return by_stack(case, limits=case.limits, attention=attention)

    names: dict[str, str] = {}
    with monkeypatch.context() as patch:
        rename(patch, lambda name: names.setdefault(name, name))
        loss, expected, _ = train()
    found = 0
    for pair in random.Random(0).sample(list(combinations(names, 2)), 100):
        with monkeypatch.context() as patch:
            rename(patch, lambda name, pair=pair: pair[1] if name in pair else name)
            try:
                found_loss, gradient, _ = train()
            except RuntimeError as error:
                if "is taken in use" not in str(error):
                    raise
                found += 1
                continue
        assert found_loss == loss, pair
        assert all(torch.equal(gradient[name], expected[name]) for name in expected), pair
    assert found > 100 / 4


def test_a_pass_without_gradients_in_between_does_no_harm():
    case = make_case()
    _, expected, _ = by_stack(case)
    drafter = make_drafter(attention="split")
    flatten(drafter, CPU, torch.float32)
    loss = loss_of(run(drafter, case), case)
    with torch.no_grad():
        run(drafter, make_case(seed=5))
    loss.backward()
    assert_same(gradients(drafter), expected, 1e-6)


def test_reads_no_value_and_makes_no_buffer_twice():
    drafter = make_drafter(attention="split")
    flatten(drafter, CPU, torch.float32)
    case = make_case()
    loss_of(run(drafter, case), case).backward()
    held = drafter.stack.workspace.bytes
    objective, scale = CrossEntropy(), case.scale
    with watch() as seen:
        objective(run(drafter, case), case.head, case.labels, case.weights, scale)[0].backward()
    assert not seen.reads
    assert drafter.stack.workspace.bytes == held
    made = sum(1 for name, _ in seen.shapes if name in ("aten::empty.memory_format", "aten::empty_like"))
    assert made <= 2, "only the loss makes its gradient"


def test_flat_buffers_alone_leave_the_modules_in_charge():
    drafter = make_drafter(attention="split")
    FlatParameters(drafter, CPU, torch.float32)
    assert drafter.stack is None


def test_a_run_is_trained_by_the_written_out_pass(tmp_path):
    for replica in small_trainer(tmp_path).replicas:
        assert isinstance(replica.drafter.stack, Stack)


def test_a_layout_that_cannot_be_joined_falls_back_to_the_modules():
    case = make_case()
    loss, expected = by_modules(case)
    drafter = make_drafter(attention="split")
    broken = FlatParameters(drafter, CPU, torch.float32)
    broken.places = dict(reversed(broken.places.items()))
    with pytest.raises(ValueError, match="side by side"):
        broken.joined(
            broken.working, ["layers.0.self_attn.q_proj.weight", "layers.0.self_attn.v_proj.weight"]
        )
    found = loss_of(run(drafter, case), case)
    found.backward()
    assert float(found.detach()) == pytest.approx(loss, rel=1e-6)
    assert_same(gradients(drafter), expected, 1e-5)


def test_the_original_modules_share_the_flat_weights():
    drafter = Drafter(dataclasses.replace(make_drafter().shape, attention="split"), 3)
    flat = flatten(drafter, CPU, torch.float32)
    flat.working.fill_(0.25)
    assert all((parameter == 0.25).all() for parameter in drafter.parameters())
