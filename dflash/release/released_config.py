"""The config of a released drafter -> its shape: every key held against a type, wherever it stands, and what
is no plain DFlash drafter refused. Reference 2.1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash.models.drafter import DrafterShape
from steptime.errors import UserError

SLIDING, FULL = "sliding_attention", "full_attention"
SCALES = {
    "embedding_scale": "input_embedding_scale",
    "logit_scale": "output_multiplier",
    "logit_softcap": "final_logit_softcapping",
}
"""What a drafter follows its target in, and the keys of a released config; a config without them leaves it to
the target."""


def shape_from_speculators(config: Mapping[str, Any], where: str) -> DrafterShape:
    kind = config["speculators_model_type"]
    if kind != "dflash":
        raise UserError(f"{where}: a speculators model of type {kind!r}; only 'dflash' can be read")
    inner = config.get("transformer_layer_config")
    aux = config.get("aux_hidden_state_layer_ids")
    if not isinstance(inner, dict) or not aux:
        raise UserError(
            f"{where}: its config has no transformer_layer_config or no aux_hidden_state_layer_ids"
        )
    if not isinstance(aux, list) or not all(type(index) is int for index in aux):
        raise UserError(f"{where}: aux_hidden_state_layer_ids must be a list of layer numbers")
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
    return shape_from_config(inner, outer, where)


def shape_from_config(inner: Mapping[str, Any], outer: Mapping[str, Any], where: str) -> DrafterShape:
    """Shape from the transformer's keys (`inner`) and the drafter's own (`outer`)."""
    own = outer.get("dflash_config") or {}
    if not isinstance(own, Mapping):
        raise UserError(f"{where}: dflash_config is a {type(own).__name__}, not an object")
    keys = {**inner, **outer, **own}
    read = _validated(keys, where)
    _refuse_other_kinds(read, keys, where)
    layers = read.num_hidden_layers
    kinds = read.layer_types or [FULL] * layers
    sliding = sum(kind == SLIDING for kind in kinds)
    if kinds != [SLIDING] * sliding + [FULL] * (layers - sliding):
        raise UserError(
            f"{where}: layer_types {kinds}: sliding layers must come first, full attention after them"
        )
    thetas = {value for value in (read.rope_theta, (read.rope_parameters or _NO_ROPE).rope_theta) if value}
    if len(thetas) != 1:
        found = (
            f"two values of rope_theta, {sorted(thetas)}"
            if thetas
            else "no rope_theta, plain or in rope_parameters"
        )
        raise UserError(f"{where}: its config has {found}")
    scales: dict[str, Any] = {
        name: value for name, key in SCALES.items() if (value := getattr(read, key)) is not None
    }
    return DrafterShape(
        hidden_size=read.hidden_size,
        intermediate_size=read.intermediate_size,
        layers=layers,
        heads=read.num_attention_heads,
        kv_heads=read.num_key_value_heads or read.num_attention_heads,
        head_dim=read.head_dim or max(1, read.hidden_size // read.num_attention_heads),
        block_size=read.block_size,
        vocab_size=read.vocab_size,
        mask_token_id=read.mask_token_id,
        target_layers=read.num_target_layers or 0,
        target_layer_ids=tuple(read.target_layer_ids),
        rope_theta=thetas.pop(),
        rms_norm_eps=read.rms_norm_eps or 1e-6,
        sliding_window=read.sliding_window or 2048,
        sliding_layers=sliding,
        **scales,
    )


_Size = Annotated[int, Field(gt=0, le=2**31)]
_Number = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class _Rope(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    rope_theta: _Number | None = None
    rope_type: str | None = None
    type: str | None = None
    mrope_section: list[Any] | None = None
    partial_rotary_factor: float | None = None


_NO_ROPE = _Rope()


class _Released(BaseModel):
    """The keys of a released config that are read, wherever they stand."""

    model_config = ConfigDict(strict=True, extra="ignore")
    hidden_size: _Size
    intermediate_size: _Size
    num_hidden_layers: Annotated[int, Field(gt=0, le=1000)]
    num_attention_heads: _Size
    vocab_size: _Size
    mask_token_id: Annotated[int, Field(ge=0, le=2**31)]
    target_layer_ids: Annotated[list[int], Field(max_length=1000)]
    block_size: Annotated[int, Field(ge=2, le=4096)]
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    num_target_layers: Annotated[int, Field(ge=0, le=10_000)] | None = None
    rope_theta: _Number | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    partial_rotary_factor: float | None = None
    rms_norm_eps: _Number | None = None
    sliding_window: _Size | None = None
    layer_types: Annotated[list[str], Field(max_length=1000)] | None = None
    hidden_act: str = "silu"
    attention_bias: bool | None = None
    is_causal: bool | None = None
    causal: bool | None = None
    draft_vocab_size: int | None = None
    input_embedding_scale: _Number | None = None
    output_multiplier: _Number | None = None
    final_logit_softcapping: _Number | None = None


def _validated(keys: Mapping[str, Any], where: str) -> _Released:
    try:
        return _Released.model_validate(dict(keys))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing" or (first["input"] is None and key in keys):
            raise UserError(f"{where}: its config has no {key}") from None
        shown = repr(first["input"])[:80]
        raise UserError(f"{where}: {key} is {shown}: {first['msg'][0].lower()}{first['msg'][1:]}") from None


def _refuse_other_kinds(read: _Released, keys: Mapping[str, Any], where: str) -> None:
    """Refuse what changes the computation and is not a plain DFlash drafter, wherever its key stands."""
    for name, rope in (("rope_scaling", read.rope_scaling), ("rope_parameters", read.rope_parameters)):
        if rope is None:
            continue
        if (rope.rope_type or rope.type or "default") != "default" or rope.mrope_section:
            raise UserError(
                f"{where}: its rotary embedding is scaled ({name} {keys[name]}); a drafter has a plain one"
            )
    factors = {rope.partial_rotary_factor for rope in (read.rope_scaling, read.rope_parameters) if rope}
    if {read.partial_rotary_factor, *factors} - {None, 1}:
        raise UserError(
            f"{where}: partial_rotary_factor leaked in from a target; a drafter rotates all of head_dim"
        )
    if read.attention_bias:
        raise UserError(f"{where}: attention_bias is on; a drafter's projections have no biases")
    if read.hidden_act != "silu":
        raise UserError(f"{where}: hidden_act is {read.hidden_act!r}; a drafter's is 'silu'")
    capped = [key for key in ("attention_sink_bias", "projector_type") if keys.get(key)]
    other = [key for key in keys if key.startswith(("conv_", "selector_")) and keys[key] is not None]
    if read.draft_vocab_size not in (None, read.vocab_size):
        raise UserError(
            f"{where}: reduced vocabulary, {read.draft_vocab_size} of the target's {read.vocab_size}: not "
            "supported"
        )
    if capped or other:
        key = (capped + other)[0]
        raise UserError(
            f"{where}: its config has {key!r}: not a plain DFlash drafter (DFlash 2 or a variant)"
        )
    causal = read.is_causal if read.is_causal is not None else read.causal
    kinds = set(read.layer_types or [FULL])
    if causal is not None and kinds != ({SLIDING} if causal else {FULL}):
        raise UserError(
            f"{where}: is_causal is {causal} with {sorted(kinds)} layers: sliding ones are causal in their "
            "block, full ones not"
        )
