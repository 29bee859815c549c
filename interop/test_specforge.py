"""Parity with SpecForge 0.2.0, number for number: same weights, batch and anchors, then same loss and same
gradients.

float32 on the CPU. Tolerance: loss within 1e-6 relative; every gradient tensor within 2e-5 of its norm (two
orders of summation)."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dflash.config import ObjectiveConfig
from dflash.models.objectives import OBJECTIVES
from tests.models.cases import SHAPE, Case, flatten, gradients, make_case, make_drafter, run

pytest.importorskip("specforge", reason="needs specforge==0.2.0: nox -s interop")

LAYERS = {"full": 0, "sliding": 3, "mixed": 2}
WINDOW = 9
LOSS, GRADIENT = 1e-6, 2e-5


def specforge_model(state: dict[str, torch.Tensor], case: Case, sliding: int, loss_type: str):
    """Their training wrapper around their drafter, with our weights, our target's ends and our anchors."""
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

    config = Qwen3Config(
        hidden_size=SHAPE.hidden_size,
        intermediate_size=SHAPE.intermediate_size,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv_heads,
        head_dim=SHAPE.head_dim,
        vocab_size=SHAPE.vocab_size,
        rms_norm_eps=SHAPE.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": SHAPE.rope_theta},
        layer_types=["sliding_attention"] * sliding + ["full_attention"] * (SHAPE.layers - sliding),
        use_sliding_window=sliding > 0,
        sliding_window=WINDOW if sliding else None,
    )
    config.num_target_layers, config.block_size, config._attn_implementation = (
        SHAPE.target_layers,
        SHAPE.block_size,
        "sdpa",
    )
    config.dflash_config = {
        "mask_token_id": SHAPE.mask_token_id,
        "target_layer_ids": list(SHAPE.target_layer_ids),
    }
    drafter = DFlashDraftModel(config).float()
    drafter.load_state_dict(state, strict=True)
    head = torch.nn.Linear(SHAPE.hidden_size, SHAPE.vocab_size, bias=False).requires_grad_(False)
    embedding = torch.nn.Embedding(SHAPE.vocab_size, SHAPE.hidden_size).requires_grad_(False)
    head.weight.copy_(case.head)
    embedding.weight.copy_(case.embedding)
    model = OnlineDFlashModel(
        drafter,
        head,
        embedding,
        SHAPE.mask_token_id,
        SHAPE.block_size,
        attention_backend="sdpa",
        num_anchors=case.geometry.anchors,
        loss_decay_gamma=case.geometry.gamma,
        objective_chunk_blocks=3,
        loss_type=loss_type,
    )
    model._sample_anchor_positions = lambda *_: (case.anchors, case.keep)
    return model, drafter


@pytest.mark.parametrize("path", ["written out", "written out, limits", "modules"])
@pytest.mark.parametrize("loss_type", ["dflash", "dpace"])
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("layers", LAYERS)
def test_same_loss_and_gradients(layers, dropped, loss_type, path):
    case = make_case(dropped=dropped)
    assert bool((~case.keep).any()) == dropped
    sliding = LAYERS[layers]
    ours = make_drafter(
        attention="dense" if path == "modules" else "split", sliding_layers=sliding, sliding_window=WINDOW
    )
    model, theirs = specforge_model(ours.state_dict(), case, sliding, loss_type)
    their_loss, _, metrics = model(case.input_ids, case.features, torch.from_numpy(case.loss_mask).float())
    their_loss.backward()

    if path != "modules":
        flatten(ours, torch.device("cpu"), torch.float32)
    # Their D-PACE is divided by the batch, their decayed loss by its weights.
    scale = case.scale if loss_type == "dflash" else 1.0 / len(case.input_ids)
    kind = "ce" if loss_type == "dflash" else "dpace"
    objective = OBJECTIVES[kind](ObjectiveConfig(chunk_slots=11))
    hidden = run(ours, case, limits=case.limits if path == "written out, limits" else None)
    loss, stats = objective(hidden, case.head, case.labels, case.weights, scale)
    loss.backward()

    assert float(loss.detach()) == pytest.approx(float(their_loss.detach()), rel=LOSS)
    correct, supervised = metrics["ratio_metrics"]["acc"]
    slots = SHAPE.block_size - 1
    assert float(stats[4 : 4 + slots].sum()) == float(correct)
    assert float(stats[4 + slots :].sum()) == float(supervised)
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    found = gradients(ours)
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        error = float((found[name] - gradient).norm() / gradient.norm())
        assert error < GRADIENT, f"{name}: relative error {error:.1e}"


def test_same_anchor_candidates():
    """What may be an anchor: theirs and ours agree on every mask of eight positions."""
    from dflash.data.anchors import anchor_candidates

    case = make_case()
    model, _ = specforge_model(make_drafter(attention="dense").state_dict(), case, 0, "dflash")
    del model._sample_anchor_positions
    model.num_anchors = 8
    for pattern in range(1, 256):
        mask = torch.tensor([[bool(pattern >> i & 1) for i in range(8)]])
        ours = anchor_candidates(mask[0].numpy()).tolist()
        if not ours:
            with pytest.raises(ValueError, match="two consecutive supervised"):
                model._sample_anchor_positions(8, mask.float(), mask.device)
            continue
        anchors, keep = model._sample_anchor_positions(8, mask.float(), mask.device)
        assert anchors[keep].tolist() == ours


@pytest.mark.parametrize("layers", [16, 24, 28, 32, 36, 40, 64])
def test_same_layer_ids(layers):
    from specforge.modeling.draft.dflash import build_target_layer_ids as theirs

    from dflash.models.target import build_target_layer_ids

    assert list(build_target_layer_ids(layers, 5)) == theirs(layers, 5)


def test_a_shifted_label_would_show():
    """The comparison can fail: the same numbers with labels one further are far apart."""
    case = make_case()
    ours = make_drafter(attention="split")
    model, _ = specforge_model(ours.state_dict(), case, 0, "dflash")
    their_loss = model(case.input_ids, case.features, torch.from_numpy(case.loss_mask).float())[0]
    shifted = dataclasses.replace(case, labels=case.labels.roll(1, dims=2))
    with torch.no_grad():
        loss, _ = OBJECTIVES["ce"]()(run(ours, case), case.head, shifted.labels, case.weights, case.scale)
    assert abs(float(loss) - float(their_loss.detach())) > 1e-2
