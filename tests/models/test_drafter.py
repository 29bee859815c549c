"""The drafter: its checkpoint's names, what its slots can and cannot see, and that its shapes are
constant."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dflash.config import DrafterConfig
from dflash.models.drafter import Drafter, DrafterShape
from dflash.models.target import TargetInfo
from steptime.errors import UserError
from tests.models.cases import SHAPE, Case, make_case, make_drafter, run
from tests.models.watch import watch

INFO = TargetInfo("t", "qwen3", 32, 64, 97, 12, (1, 4, 9), (95,), None, 4096)


def released_names(layers: int) -> set[str]:
    """Reference 2.1, written out."""
    parts = ["input_layernorm", "post_attention_layernorm"]
    parts += [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    parts += [f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    names = {f"layers.{i}.{part}.weight" for i in range(layers) for part in parts}
    return names | {"fc.weight", "hidden_norm.weight", "norm.weight"}


def test_the_state_dict_is_the_released_checkpoint():
    drafter = Drafter(dataclasses.replace(SHAPE, layers=5))
    state = drafter.state_dict()
    assert set(state) == released_names(5)
    assert len(state) == 58
    shape = SHAPE
    assert state["fc.weight"].shape == (shape.hidden_size, shape.taps * shape.hidden_size)
    assert state["layers.0.self_attn.q_proj.weight"].shape == (
        shape.heads * shape.head_dim,
        shape.hidden_size,
    )
    assert state["layers.4.self_attn.v_proj.weight"].shape == (
        shape.kv_heads * shape.head_dim,
        shape.hidden_size,
    )
    assert state["layers.0.self_attn.k_norm.weight"].shape == (shape.head_dim,)
    assert state["layers.2.mlp.down_proj.weight"].shape == (shape.hidden_size, shape.intermediate_size)


def test_weights_come_from_the_seed_alone():
    torch.manual_seed(1)
    first = Drafter(SHAPE, seed=7).state_dict()
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    second = Drafter(SHAPE, seed=7).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["fc.weight"], Drafter(SHAPE, seed=8).state_dict()["fc.weight"])


def difference(drafter: Drafter, one: Case, two: Case) -> torch.Tensor:
    """Largest change of each block's slots `[batch, anchors]`."""
    with torch.no_grad():
        return (run(drafter, one) - run(drafter, two)).abs().amax(dim=(2, 3))


def with_feature(case: Case, row: int, column: int) -> Case:
    features = case.features.clone()
    features[row, column] += 3.0
    return case.changed(features=features)


@pytest.mark.parametrize("attention", ["dense", "split"])
def test_a_block_sees_the_context_strictly_before_its_anchor(attention):
    case, drafter = make_case(), make_drafter(attention=attention)
    for column in (0, int(case.anchors[0, 4]) - 1, int(case.anchors[0, 4]), 43):
        moved = difference(drafter, case, with_feature(case, 0, column))
        assert ((moved[0] > 1e-4) == (case.anchors[0] > column)).all()
        assert not moved[1].any()


@pytest.mark.parametrize("attention", ["dense", "split"])
def test_a_block_does_not_see_another(attention):
    case, drafter = make_case(), make_drafter(attention=attention)
    ids = case.input_ids.clone()
    token = int(case.anchors[0, 3])
    ids[0, token] = (ids[0, token] + 1) % 90
    moved = difference(drafter, case, case.changed(input_ids=ids))
    assert moved[0, 3] > 1e-4
    assert int((moved > 0).sum()) == 1


def test_a_block_does_not_see_another_document():
    case, drafter = make_case(documents=True), make_drafter()
    assert case.document_start[0].max() > 0
    moved = difference(drafter, case, with_feature(case, 0, 2))
    first = (case.document_start[0] == 0) & (case.anchors[0] > 2)
    assert ((moved[0] > 1e-4) == first).all()


def test_a_sliding_layer_forgets_what_is_further_back():
    window = 10
    case, drafter = make_case(), make_drafter(layers=1, sliding_layers=1, sliding_window=window)
    column = 12
    moved = run(drafter, case) - run(drafter, with_feature(case, 0, column))
    moved = moved.detach().abs().amax(dim=3)[0]
    for n, anchor in enumerate(case.anchors[0].tolist()):
        for k in range(1, SHAPE.block_size):
            sees = column < anchor and anchor + k - column < window
            # One layer: slot k's own attention only; earlier slots of the block reach no further.
            assert (moved[n, k - 1] > 1e-5) == sees


def test_slots_differ_only_by_position_and_the_anchor_moves_them():
    case, drafter = make_case(), make_drafter()
    shifted = case.changed(anchors=(case.anchors + 1).clamp(max=43))
    assert (difference(drafter, case, shifted)[case.keep] > 1e-4).all()


@pytest.mark.parametrize("attention", ["dense", "split"])
def test_no_operation_reads_a_value_and_shapes_are_constant(attention):
    drafter = make_drafter(attention=attention)
    run(drafter, make_case())  # grows the rotary tables
    seen = []
    for seed, dropped in ((0, False), (1, True)):
        case = make_case(seed=seed, dropped=dropped)
        with watch() as seen_now:
            run(drafter, case)
        assert not seen_now.reads
        seen.append(seen_now.shapes)
    assert seen[0] == seen[1], "shapes depend on the data"


def test_resolve_takes_from_the_target_what_the_config_leaves_open():
    shape = DrafterShape.resolve(DrafterConfig(layers=2, heads=4, kv_heads=2, head_dim=16), INFO, 96)
    assert (shape.hidden_size, shape.intermediate_size, shape.vocab_size) == (32, 64, 97)
    assert shape.target_layer_ids == (1, 4, 9)
    assert shape.rope_theta == 1e6


def test_resolve_refuses_another_hidden_size():
    with pytest.raises(UserError, match=r"drafter\.hidden_size = 48.*has 32"):
        DrafterShape.resolve(DrafterConfig(hidden_size=48), INFO, 96)
    with pytest.raises(UserError, match="intermediate"):
        DrafterShape.resolve(DrafterConfig(), dataclasses.replace(INFO, intermediate_size=0), 96)
    with pytest.raises(UserError, match=r"drafter\.head_dim = 15"):
        DrafterShape.resolve(DrafterConfig(head_dim=15), INFO, 96)


def test_load_state_names_what_does_not_fit():
    drafter = Drafter(SHAPE, seed=1)
    good = {name: tensor.clone() for name, tensor in Drafter(SHAPE, seed=2).state_dict().items()}
    drafter.load_state(good)
    assert torch.equal(drafter.fc.weight, good["fc.weight"])
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight' is missing"):
        drafter.load_state({name: t for name, t in good.items() if name != "layers.1.mlp.up_proj.weight"})
    with pytest.raises(UserError, match=r"'embed_tokens\.weight' is no part"):
        drafter.load_state({**good, "embed_tokens.weight": torch.zeros(97, 32)})
    with pytest.raises(UserError, match=r"'fc\.weight' has shape \[32, 64\], this drafter's is \[32, 96\]"):
        drafter.load_state({**good, "fc.weight": torch.zeros(32, 64)})
