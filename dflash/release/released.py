"""Drafters on disk: the layout that z-lab, SGLang and vLLM read, speculators' form, and our own checkpoints.

Reference 2.1. SGLang ignores tensors whose names it does not know and checks only the shape of `fc`, so a
wrong checkpoint serves without a word and drafts badly: everything read or written here is held against the
exact set of names and shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from dflash.models.drafter import Drafter, DrafterShape
from dflash.models.target import TargetInfo
from steptime.errors import UserError

if TYPE_CHECKING:
    from dflash.models.optimizer import FlatParameters

SLIDING, FULL = "sliding_attention", "full_attention"
# In speculators' files: the verifier's own weights, which are no part of the drafter.
VERIFIER_TENSORS = frozenset(
    {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight", "t2d", "d2t"}
)


def tensor_layout(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a released drafter: 11 a layer and 3 more."""
    h, inter, d = shape.hidden_size, shape.intermediate_size, shape.head_dim
    layer = {
        "input_layernorm": (h,),
        "post_attention_layernorm": (h,),
        "self_attn.q_proj": (shape.heads * d, h),
        "self_attn.k_proj": (shape.kv_heads * d, h),
        "self_attn.v_proj": (shape.kv_heads * d, h),
        "self_attn.o_proj": (h, shape.heads * d),
        "self_attn.q_norm": (d,),
        "self_attn.k_norm": (d,),
        "mlp.gate_proj": (inter, h),
        "mlp.up_proj": (inter, h),
        "mlp.down_proj": (h, inter),
    }
    layout: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, shape.taps * h),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    for index in range(shape.layers):
        layout |= {f"layers.{index}.{name}.weight": size for name, size in layer.items()}
    return layout


def check_tensors(
    tensors: Mapping[str, torch.Tensor], shape: DrafterShape, where: str, dtype: torch.dtype | None = None
) -> None:
    """Hold tensors against the layout.

    Raises:
        UserError: naming the first tensor that is missing, extra, misshapen or of another type.
    """
    layout = tensor_layout(shape)
    for name in layout:
        if name not in tensors:
            raise UserError(
                f"{where}: tensor {name!r} is missing ({len(tensors)} of the drafter's {len(layout)} are "
                "there)"
            )
    for name, tensor in tensors.items():
        if name not in layout:
            raise UserError(f"{where}: tensor {name!r} is no part of a drafter of {shape.layers} layers")
        if tuple(tensor.shape) != layout[name]:
            raise UserError(
                f"{where}: tensor {name!r} has shape {list(tensor.shape)}, its config says "
                f"{list(layout[name])}"
            )
        if dtype is not None and tensor.dtype != dtype:
            raise UserError(f"{where}: tensor {name!r} is {tensor.dtype}, expected {dtype}")


def load_released(path: str | Path) -> tuple[DrafterShape, dict[str, torch.Tensor]]:
    """Read a released drafter, in z-lab's or speculators' form.

    Returns:
        Its shape (`target_layers` is 0 where the file does not say) and its tensors as they lie in the file.

    Raises:
        UserError: not there, another kind of drafter, or tensors that do not fit the config, by name.
    """
    folder = Path(path)
    config = _read_json(folder / "config.json")
    if config.get("speculators_model_type") is not None:
        shape = _shape_from_speculators(config, str(folder))
    else:
        shape = _shape_from_config(config, config, str(folder))
    tensors = _read_tensors(folder)
    if config.get("speculators_model_type") is not None:
        tensors = {name: tensor for name, tensor in tensors.items() if name not in VERIFIER_TENSORS}
    check_tensors(tensors, shape, str(folder))
    return shape, tensors


def build_drafter(
    shape: DrafterShape,
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
    where: str = "drafter",
) -> Drafter:
    """A drafter for inference with these weights."""
    with torch.device("meta"):
        drafter = Drafter(shape)
    drafter.to_empty(device=device).to(dtype)
    drafter.load_state(tensors, where)
    return drafter.requires_grad_(False).eval()


def warm_start(flat: FlatParameters, path: str | Path, shape: DrafterShape) -> None:
    """Start training from a released drafter: its tensors become the masters, exactly.

    The block size may differ; everything that gives the weights their meaning must not.

    Args:
        flat: the parameters of a drafter of `shape`.

    Raises:
        UserError: nothing readable at `path`, tensors missing, extra or misshapen by name, or a drafter of
            another shape or for another target, with both sizes.
    """
    released, tensors = load_released(path)
    check_same(released, shape, f"drafter.init = {str(path)!r}")
    with torch.no_grad():
        for name, view in flat.named(flat.master):
            view.copy_(tensors[name])
    flat.refresh_working()


SCALES = {
    "embedding_scale": "input_embedding_scale",
    "logit_scale": "output_multiplier",
    "logit_softcap": "final_logit_softcapping",
}
"""What a drafter follows its target in, and the keys of a released config; a config without them leaves it to
the target."""
_PLAIN = {item.name: item.default for item in fields(DrafterShape) if item.name in SCALES}
_TARGETS = {"hidden_size", "vocab_size", "target_layers", "target_layer_ids"}
COMPUTING = frozenset({"attention", "compile"})
"""Fields of a shape that say how it is computed; they are no part of a checkpoint."""
_FREE = COMPUTING | {"block_size"}


def check_same(released: DrafterShape, wanted: DrafterShape, where: str) -> None:
    """Refuse a released drafter whose weights would mean something else in the wanted shape.

    Raises:
        UserError: naming what differs, with both values.
    """
    for item in sorted(fields(DrafterShape), key=lambda item: item.name not in _TARGETS):
        own, other = getattr(released, item.name), getattr(wanted, item.name)
        unknown = item.name == "target_layers" and own == 0
        unused = item.name == "sliding_window" and not released.sliding_layers and not wanted.sliding_layers
        unsaid = item.name in SCALES and own == _PLAIN[item.name]
        if item.name in _FREE or own == other or unknown or unused or unsaid:
            continue
        if item.name in _TARGETS:
            raise UserError(
                f"{where}: made for another target: its {item.name} is {_plain(own)}, this target's "
                f"{_plain(other)}"
            )
        raise UserError(f"{where}: its {item.name} is {_plain(own)}, the config asks for {_plain(other)}")


def said_scales(shape: DrafterShape) -> dict[str, float]:
    """The fields of `SCALES` that are not the plain ones, with their values."""
    return {name: getattr(shape, name) for name in SCALES if getattr(shape, name) != _PLAIN[name]}


def check_against_target(
    shape: DrafterShape, info: TargetInfo, where: str, pad_ids: frozenset[int] = frozenset()
) -> None:
    """Hold a drafter's shape against a target.

    Args:
        pad_ids: more ids that the mask token must not be, such as the tokenizer's pad and end.

    Raises:
        UserError: another target's sizes, layer ids out of range, a mask id outside the vocabulary or with
            another use.
    """
    for what, own, other in (
        ("hidden_size", shape.hidden_size, info.hidden_size),
        ("vocab_size", shape.vocab_size, info.vocab_size),
        ("num_target_layers", shape.target_layers or info.layers, info.layers),
        *((SCALES[name], own, getattr(info, name)) for name, own in said_scales(shape).items()),
    ):
        if own != other:
            raise UserError(
                f"{where}: made for another target: its {what} is {own}, target {info.model!r} has {other}"
            )
    ids = list(shape.target_layer_ids)
    if not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= info.layers:
        raise UserError(
            f"{where}: target_layer_ids {ids}: must be ascending and below the target's {info.layers} layers"
        )
    if not 0 <= shape.mask_token_id < info.vocab_size:
        raise UserError(
            f"{where}: mask token {shape.mask_token_id} is outside the target's vocabulary of "
            f"{info.vocab_size} rows"
        )
    if shape.mask_token_id in {info.pad_id, *info.eos_ids, *pad_ids}:
        raise UserError(
            f"{where}: mask token {shape.mask_token_id} is the target's pad or end token; it needs an unused "
            "row"
        )
    if shape.head_dim % 2 or shape.heads % shape.kv_heads:
        raise UserError(
            f"{where}: {shape.heads} heads of {shape.head_dim} over {shape.kv_heads}: the size must be even, "
            "the heads a multiple"
        )


# -- reading -------------------------------------------------------------------------------------------------


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{path.parent}: no released drafter here (config.json is missing)") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a drafter's config")
    return value


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    index = folder / "model.safetensors.index.json"
    names = sorted(set(_read_json(index)["weight_map"].values())) if index.exists() else ["model.safetensors"]
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        try:
            tensors |= load_file(folder / name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{folder / name}: cannot be read: {error}") from None
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def _shape_from_speculators(config: Mapping[str, Any], where: str) -> DrafterShape:
    kind = config["speculators_model_type"]
    if kind != "dflash":
        raise UserError(f"{where}: a speculators model of type {kind!r}; only 'dflash' can be read")
    inner = config.get("transformer_layer_config")
    aux = config.get("aux_hidden_state_layer_ids")
    if not isinstance(inner, dict) or not aux:
        raise UserError(
            f"{where}: its config has no transformer_layer_config or no aux_hidden_state_layer_ids"
        )
    if config.get("sample_from_anchor"):
        raise UserError(
            f"{where}: sample_from_anchor is on: its slots predict one token further on than DFlash's"
        )
    if config.get("sliding_window_non_causal"):
        raise UserError(
            f"{where}: sliding_window_non_causal is on; sliding layers are causal in their block here"
        )
    # Theirs number the inputs of layers, ours the outputs.
    outer = {
        "block_size": config.get("block_size"),
        "num_target_layers": config.get("num_target_layers", 0),
        "draft_vocab_size": config.get("draft_vocab_size"),
        "dflash_config": {
            "mask_token_id": config.get("mask_token_id"),
            "target_layer_ids": [i - 1 for i in aux],
        },
    }
    return _shape_from_config(inner, outer, where)


def _shape_from_config(inner: Mapping[str, Any], outer: Mapping[str, Any], where: str) -> DrafterShape:
    """Shape from the transformer's keys (`inner`) and the drafter's own (`outer`)."""
    own = outer.get("dflash_config") or {}
    if not isinstance(own, Mapping):
        raise UserError(f"{where}: dflash_config is a {type(own).__name__}, not an object")
    found = {**inner, **outer, **own}
    _refuse_other_kinds(inner, found, where)
    rope = inner.get("rope_parameters") or {}
    layers = _need(inner, "num_hidden_layers", where)
    heads = _need(inner, "num_attention_heads", where)
    hidden = _need(inner, "hidden_size", where)
    kinds = inner.get("layer_types") or [FULL] * layers
    sliding = sum(kind == SLIDING for kind in kinds)
    if kinds != [SLIDING] * sliding + [FULL] * (layers - sliding):
        raise UserError(
            f"{where}: layer_types {kinds}: sliding layers must come first, full attention after them"
        )
    mask: Any = own.get("mask_token_id", outer.get("mask_token_id"))
    ids: Any = own.get("target_layer_ids", outer.get("target_layer_ids"))
    block: Any = outer.get("block_size") or own.get("block_size")
    for name, value in (("mask_token_id", mask), ("target_layer_ids", ids), ("block_size", block)):
        if value is None:
            raise UserError(f"{where}: its config has no {name}")
    thetas = {
        float(value) for value in (inner.get("rope_theta"), rope.get("rope_theta")) if value is not None
    }
    if len(thetas) != 1:
        found = (
            f"two values of rope_theta, {sorted(thetas)}"
            if thetas
            else "no rope_theta, plain or in rope_parameters"
        )
        raise UserError(f"{where}: its config has {found}")
    scales: dict[str, Any] = {
        name: _number(found[key], key, where) for name, key in SCALES.items() if found.get(key) is not None
    }
    return DrafterShape(
        hidden_size=hidden,
        intermediate_size=_need(inner, "intermediate_size", where),
        layers=layers,
        heads=heads,
        kv_heads=inner.get("num_key_value_heads") or heads,
        head_dim=inner.get("head_dim") or hidden // heads,
        block_size=int(block),
        vocab_size=_need(inner, "vocab_size", where),
        mask_token_id=int(mask),
        target_layers=int(outer.get("num_target_layers") or 0),
        target_layer_ids=tuple(int(i) for i in ids),
        rope_theta=thetas.pop(),
        rms_norm_eps=float(inner.get("rms_norm_eps", 1e-6)),
        sliding_window=int(inner.get("sliding_window") or 2048),
        sliding_layers=sliding,
        **scales,
    )


def _refuse_other_kinds(inner: Mapping[str, Any], own: Mapping[str, Any], where: str) -> None:
    """Refuse what changes the computation and is not a plain DFlash drafter.

    Args:
        inner: the transformer's keys.
        own: every key, wherever it stands; those in `dflash_config` win.
    """
    for name in ("rope_scaling", "rope_parameters"):
        rope = inner.get(name) or {}
        if rope.get("rope_type", rope.get("type", "default")) != "default" or rope.get("mrope_section"):
            raise UserError(
                f"{where}: its rotary embedding is scaled ({name} {rope}); a drafter has a plain one"
            )
        if {inner.get("partial_rotary_factor"), rope.get("partial_rotary_factor")} - {None, 1}:
            raise UserError(
                f"{where}: partial_rotary_factor leaked in from a target; a drafter rotates all of head_dim"
            )
    if inner.get("attention_bias"):
        raise UserError(f"{where}: attention_bias is on; a drafter's projections have no biases")
    if inner.get("hidden_act", "silu") != "silu":
        raise UserError(f"{where}: hidden_act is {inner['hidden_act']!r}; a drafter's is 'silu'")
    capped = [key for key in ("attention_sink_bias", "projector_type") if own.get(key)]
    other = [key for key in own if key.startswith(("conv_", "selector_")) and own[key] is not None]
    if own.get("draft_vocab_size") not in (None, inner.get("vocab_size")):
        raise UserError(
            f"{where}: reduced vocabulary, {own['draft_vocab_size']} of the target's "
            f"{inner.get('vocab_size')}: not supported"
        )
    if capped or other:
        key = (capped + other)[0]
        raise UserError(
            f"{where}: its config has {key!r}: not a plain DFlash drafter (DFlash 2 or a variant)"
        )
    causal = inner.get("is_causal", own.get("causal"))
    kinds = set(inner.get("layer_types") or [FULL])
    if causal is not None and kinds != ({SLIDING} if causal else {FULL}):
        raise UserError(
            f"{where}: is_causal is {causal} with {sorted(kinds)} layers: sliding ones are causal in their "
            "block, full ones not"
        )


def _need(config: Mapping[str, Any], key: str, where: str) -> int:
    value = config.get(key)
    if not isinstance(value, int):
        raise UserError(f"{where}: its config has no {key}")
    return value


def _number(value: Any, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < float("inf"):
        raise UserError(f"{where}: {key} is {value!r}, not a positive number")
    return float(value)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
