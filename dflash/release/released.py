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
from dflash.release.released_config import SCALES, shape_from_config, shape_from_speculators
from steptime.errors import UserError

if TYPE_CHECKING:
    from dflash.models.optimizer import FlatParameters

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
        shape = shape_from_speculators(config, str(folder))
    else:
        shape = shape_from_config(config, config, str(folder))
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
        raise UserError(f"{path.parent}: no released drafter here ({path.name} is missing)") from None
    except RecursionError:
        raise UserError(f"{path}: not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a drafter's config")
    return value


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        places = _read_json(index).get("weight_map")
        if not isinstance(places, dict) or not all(
            isinstance(name, str) and name == Path(name).name for name in places.values()
        ):
            raise UserError(f"{index}: weight_map must give a file of this folder for each tensor")
        names = sorted(set(places.values()))
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        try:
            tensors |= load_file(folder / name)
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(f"{folder / name}: cannot be read: {error}") from None
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
