"""What is exported is exactly the released layout, and comes back as it was; anything else is refused by
name."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import dflash.release.export as exporting
from dflash.models.drafter import Drafter
from dflash.models.optimizer import FlatParameters
from dflash.release.export import FORMATS, export, probe
from dflash.release.released import check_against_target, check_same, load_released, tensor_layout, warm_start
from steptime.errors import UserError

KEYS = {
    "architectures", "model_type", "block_size", "dflash_config", "num_target_layers", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_theta",
    "rope_scaling", "rope_parameters", "max_position_embeddings", "vocab_size", "layer_types", "sliding_window",
    "use_sliding_window", "max_window_layers", "attention_bias", "attention_dropout", "tie_word_embeddings", "dtype",
    "torch_dtype", "initializer_range", "bos_token_id", "eos_token_id", "use_cache",
}  # fmt: skip


def same(a, b, **others):
    return replace(a, attention="auto", **others) == replace(b, attention="auto")


def test_the_layout_is_the_models_own(shape):
    own = {name: tuple(tensor.shape) for name, tensor in Drafter(shape).state_dict().items()}
    assert tensor_layout(shape) == own
    assert len(own) == 58


def test_the_zlab_form(shape, tensors, info, tmp_path):
    done = export(shape, tensors, info, tmp_path / "out")
    assert (done.tensors, done.probes) == (58, 2 * 7 * 64)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert {name: tuple(tensor.shape) for name, tensor in written.items()} == tensor_layout(shape)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert set(config) == KEYS  # no is_causal, no auto_map, nothing of the target's rotary embedding
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e7
    assert config["rope_scaling"] is None
    assert config["block_size"] == config["dflash_config"]["block_size"] == 8
    assert config["dflash_config"]["target_layer_ids"] == list(info.layer_ids)
    assert config["layer_types"].count("sliding_attention") == shape.sliding_layers
    assert config["sliding_window"] == (9 if shape.sliding_layers else None)


def test_auto_map_only_when_asked(shape, tensors, info, tmp_path):
    export(shape, tensors, info, tmp_path / "out", auto_map=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"] == {
        "AutoModel": "dflash.DFlashDraftModel"
    }


@pytest.mark.parametrize("format", FORMATS)
def test_a_release_comes_back_as_it_was(format, shape, tensors, info, tmp_path):
    export(shape, tensors, info, tmp_path / "out", format=format)
    read, again = load_released(tmp_path / "out")
    ignored = {} if shape.sliding_layers else {"sliding_window": read.sliding_window}
    assert same(shape, read, **ignored)
    assert torch.equal(
        probe(read, again), probe(shape, {name: tensor.bfloat16() for name, tensor in tensors.items()})
    )


def test_speculators_layer_ids_are_one_higher(shape, tensors, info, tmp_path):
    export(shape, tensors, info, tmp_path / "out", format="speculators")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [i + 1 for i in info.layer_ids]
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7


@pytest.mark.parametrize("format", FORMATS)
def test_training_starts_from_a_release(format, shape, tensors, info, tmp_path):
    export(shape, tensors, info, tmp_path / "out", format=format)
    flat = FlatParameters(Drafter(shape, 5), torch.device("cpu"), torch.bfloat16)
    warm_start(flat, tmp_path / "out", shape)
    for name, view in flat.named(flat.master):
        assert torch.equal(view, tensors[name].bfloat16().float())
    assert torch.equal(flat.working, flat.master.bfloat16())


def test_a_longer_block_may_start_from_a_shorter_one(shape, tensors, info, tmp_path):
    export(shape, tensors, info, tmp_path / "out")
    longer = replace(shape, block_size=16)
    warm_start(FlatParameters(Drafter(longer), torch.device("cpu"), torch.float32), tmp_path / "out", longer)


# -- what is refused -----------------------------------------------------------------------------------------


def rewrite(folder, change_tensors=None, change_config=None):
    if change_tensors:
        tensors = load_file(folder / "model.safetensors")
        change_tensors(tensors)
        save_file(tensors, folder / "model.safetensors")
    if change_config:
        config = json.loads((folder / "config.json").read_text())
        change_config(config)
        (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("layers.3.mlp.up_proj.weight"),
            "tensor 'layers.3.mlp.up_proj.weight' is missing (57 of the drafter's 58",
        ),
        (lambda t: t.update(extra=torch.zeros(1)), "tensor 'extra' is no part of a drafter of 5 layers"),
        (
            lambda t: t.update({"fc.weight": torch.zeros(32, 64)}),
            "tensor 'fc.weight' has shape [32, 64], its config says [32, 96]",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(change, message, shape, tensors, info, tmp_path):
    export(shape, tensors, info, tmp_path / "out")
    rewrite(tmp_path / "out", change)
    with pytest.raises(UserError, match=re.escape(message)):
        load_released(tmp_path / "out")
    change(tensors)
    with pytest.raises(UserError, match=re.escape(message.split(" (57")[0])):
        export(shape, tensors, info, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (lambda c: c.update(partial_rotary_factor=0.25), "partial_rotary_factor leaked in"),
        (
            lambda c: c["rope_parameters"].update(partial_rotary_factor=0.25),
            "partial_rotary_factor leaked in",
        ),
        (lambda c: c.update(rope_scaling={"rope_type": "yarn", "factor": 4}), "rotary embedding is scaled"),
        (lambda c: c["rope_parameters"].update(mrope_section=[11, 11, 10]), "rotary embedding is scaled"),
        (lambda c: c.update(attention_bias=True), "attention_bias is on"),
        (
            lambda c: c["dflash_config"].update(conv_kernel_size=2),
            "'conv_kernel_size': not a plain DFlash drafter",
        ),
        (lambda c: c.update(conv_group_size=16), "'conv_group_size': not a plain DFlash drafter"),
        (lambda c: c.update(selector_rank=256), "'selector_rank': not a plain DFlash drafter"),
        (lambda c: c.update(draft_vocab_size=100), "reduced vocabulary, 100 of the target's 300"),
        (lambda c: c["dflash_config"].update(draft_vocab_size=100), "reduced vocabulary, 100 of"),
        (lambda c: c.update(projector_type="mlp"), "'projector_type': not a plain"),
        (
            lambda c: c["dflash_config"].update(output_multiplier=-2.0),
            "output_multiplier is -2.0: input should be greater than 0",
        ),
        (
            lambda c: c.update(input_embedding_scale="5"),
            "input_embedding_scale is '5': input should be a valid number",
        ),
        (lambda c: c.update(dflash_config=[1]), "dflash_config is a list, not an object"),
        (lambda c: c["dflash_config"].pop("mask_token_id"), "no mask_token_id"),
        (lambda c: c.pop("hidden_size"), "no hidden_size"),
        (lambda c: (c.pop("rope_theta"), c.pop("rope_parameters")), "no rope_theta"),
        (
            lambda c: c.update(layer_types=["full_attention"] * 4 + ["sliding_attention"]),
            "sliding layers must come first",
        ),
        (lambda c: c.update(is_causal=True, layer_types=["full_attention"] * 5), "is_causal is True"),
        (lambda c: c.update(is_causal=False, layer_types=["sliding_attention"] * 5), "is_causal is False"),
    ],
)
def test_other_kinds_of_drafters_are_refused(change, message, shape, tensors, info, tmp_path):
    export(shape, tensors, info, tmp_path / "out")
    rewrite(tmp_path / "out", change_config=change)
    with pytest.raises(UserError, match=message):
        load_released(tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(draft_vocab_size=100), "reduced vocabulary, 100 of the target's 300"),
        (lambda c: c.update(sample_from_anchor=True), "sample_from_anchor is on"),
        (lambda c: c.update(speculators_model_type="eagle3"), "type 'eagle3'"),
        (lambda c: c.update(sliding_window_non_causal=True), "sliding_window_non_causal"),
    ],
)
def test_other_speculators_are_refused(change, message, shape, tensors, info, tmp_path):
    export(shape, tensors, info, tmp_path / "out", format="speculators")
    rewrite(tmp_path / "out", change_config=change)
    with pytest.raises(UserError, match=message):
        load_released(tmp_path / "out")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_size": 64}, "made for another target: its hidden_size is 32, this target's 64"),
        ({"vocab_size": 400}, "made for another target: its vocab_size is 300, this target's 400"),
        (
            {"target_layer_ids": (1, 2, 4)},
            "made for another target: its target_layer_ids is .*, this target's .1, 2, 4.",
        ),
        ({"target_layers": 12}, "made for another target: its target_layers is 8, this target's 12"),
        ({"mask_token_id": 5}, "its mask_token_id is 299, the config asks for 5"),
        ({"layers": 3}, "its layers is 5, the config asks for 3"),
        ({"rope_theta": 1e6}, "its rope_theta is 10000000.0, the config asks for 1000000.0"),
    ],
)
def test_a_release_for_something_else_is_no_start(changed, message, shape, tensors, info, tmp_path):
    export(shape, tensors, info, tmp_path / "out")
    wanted = replace(shape, **changed)
    with pytest.raises(UserError, match=f"drafter.init = .*{message}"):
        warm_start(
            FlatParameters(Drafter(shape), torch.device("cpu"), torch.float32), tmp_path / "out", wanted
        )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mask_token_id": 300}, "mask token 300 is outside the target's vocabulary of 300"),
        ({"mask_token_id": -1}, "mask token -1 is outside"),
        ({"mask_token_id": 7}, "mask token 7 is the target's pad or end token"),
        ({"target_layer_ids": (1, 4, 8)}, "below the target's 8 layers"),
        ({"target_layer_ids": (4, 1, 5)}, "must be ascending"),
        ({"hidden_size": 64}, "its hidden_size is 64, target 'tiny-hybrid' has 32"),
        ({"vocab_size": 301}, "its vocab_size is 301, target 'tiny-hybrid' has 300"),
        ({"target_layers": 9}, "its num_target_layers is 9, target 'tiny-hybrid' has 8"),
        ({"head_dim": 15}, "the size must be even"),
    ],
)
def test_a_shape_that_is_not_the_targets_is_refused(changed, message, shape, info):
    with pytest.raises(UserError, match=message):
        check_against_target(replace(shape, **changed), info, "the drafter", frozenset({7}))


def test_a_folder_with_something_in_it_is_left_alone(shape, tensors, info, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("x")
    with pytest.raises(UserError, match="exists already"):
        export(shape, tensors, info, tmp_path / "out")
    with pytest.raises(UserError, match="--format gguf: must be zlab or speculators"):
        export(shape, tensors, info, tmp_path / "new", format="gguf")


def test_the_last_layer_is_no_tap(shape, tensors, info, tmp_path):
    """z-lab's package reads transformers' hidden_states, whose last entry has been through the final norm."""
    with pytest.raises(UserError, match="taps layer 7, the target's last"):
        export(replace(shape, target_layer_ids=(1, 3, 7)), tensors, info, tmp_path / "out")


def test_nothing_there(tmp_path):
    with pytest.raises(UserError, match="no released drafter here"):
        load_released(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        load_released(tmp_path)


# -- planted: a writer with a fault never gets its folder ----------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            lambda config, shape: config["dflash_config"].update(
                target_layer_ids=[i + 1 for i in shape.target_layer_ids]
            ),
            "target_layer_ids",
        ),
        (lambda config, shape: config.update(rope_theta=1e6), "two values of rope_theta"),
        (
            lambda config, shape: (
                config.update(rope_theta=1e6),
                config["rope_parameters"].update(rope_theta=1e6),
            ),
            "rope_theta",
        ),
        (lambda config, shape: config.update(rms_norm_eps=1e-5), "rms_norm_eps"),
        (lambda config, shape: config["dflash_config"].update(mask_token_id=5), "mask_token_id"),
        (lambda config, shape: config.update(layer_types=["sliding_attention"] * 5), "sliding_"),
    ],
)
def test_a_faulty_config_is_found_before_it_appears(
    fault, message, shape, tensors, info, tmp_path, monkeypatch
):
    def faulty(shape, info, auto_map):
        config = exporting.zlab_config(shape, info, auto_map)
        fault(config, shape)
        return config

    monkeypatch.setitem(exporting.FORMATS, "zlab", faulty)
    with pytest.raises(UserError, match=message):
        export(shape, tensors, info, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_weights_that_change_on_the_way_are_found(shape, tensors, info, tmp_path, monkeypatch):
    def save(written, path, metadata):
        name = "layers.2.self_attn.k_norm.weight"
        save_file({**written, name: written[name] * 1.01}, path)

    monkeypatch.setattr(exporting, "save_file", save)
    with pytest.raises(UserError, match="other logits"):
        export(shape, tensors, info, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_what_follows_the_target_is_said_in_the_release(shape, tensors, info, tmp_path):
    follows = {"embedding_scale": 4.0, "logit_scale": 0.25, "logit_softcap": 30.0}
    scaled, target = replace(shape, **follows), replace(info, **follows)
    export(scaled, tensors, target, tmp_path / "out")
    own = json.loads((tmp_path / "out" / "config.json").read_text())["dflash_config"]
    assert (own["input_embedding_scale"], own["output_multiplier"]) == (4.0, 0.25)
    assert own["final_logit_softcapping"] == 30.0
    read, _ = load_released(tmp_path / "out")
    check_same(read, scaled, "x")
    check_against_target(shape, target, "x")  # an older release, which leaves it to the target
    with pytest.raises(UserError, match=r"its input_embedding_scale is 4.0, target .* has 1.0"):
        check_against_target(read, info, "x")
    with pytest.raises(UserError, match="that form has no place for it; choose zlab"):
        export(scaled, tensors, target, tmp_path / "spec", format="speculators")


def test_a_compiled_drafter_is_released_like_any_other(shape, tensors, info, tmp_path):
    export(replace(shape, compile=True), tensors, info, tmp_path / "out")
    check_same(load_released(tmp_path / "out")[0], shape, "x")


def test_check_same_ignores_what_does_not_matter(shape):
    check_same(shape, replace(shape, block_size=16, attention="dense", compile=True), "x")
    check_same(replace(shape, target_layers=0), shape, "x")
