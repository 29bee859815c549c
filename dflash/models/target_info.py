"""What is known of a target before its weights are: sizes, tapped layers, mask token. No weights, no network.

Reference 1.3, 1.4 and 7.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash.config import DrafterConfig, TargetConfig
from dflash.models.quantized import Quantization, quantization_of, weight_bytes
from steptime.errors import UserError

TINY = "tiny-hybrid"
# Rows of the families' embeddings that no tokenizer uses and that the published drafters mask with.
KNOWN_MASK_IDS = {
    "qwen3": 151669,
    "qwen3_5": 248070,
    "qwen3_5_text": 248070,
    "qwen3_5_moe": 248070,
    "qwen3_5_moe_text": 248070,
    "lfm2": 16,
    "minimax_m2": 200054,
}
MASK_TOKEN = "<|MASK|>"
# transformers builds models under process-wide patches, and the seeded target borrows the global generator.
LOADING = threading.Lock()


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What is known of a target without its weights.

    Attributes:
        family: transformers' `model_type` of the text model's wrapper.
        layer_ids: the tapped layers, ascending.
        eos_ids, pad_id: from the config; the tokenizer may know others.
        embedding_scale: what the target multiplies its embedding's rows by (Gemma: the root of the hidden
            size), so that the drafter reads the same vectors.
        logit_scale, logit_softcap: what the target does to its head's logits: times the first, then capped at
            the second by tanh (0: not capped).
        quantization: how its weights are stored; None: in full.
    """

    model: str
    family: str
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    layers: int
    layer_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    pad_id: int | None
    max_positions: int
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    quantization: Quantization | None = None


def build_target_layer_ids(layers: int, taps: int) -> tuple[int, ...]:
    """`taps` layers from layer 1 to layer L-3, evenly spaced (paper 4.1): round(1 + i (L-4)/(n-1)); L//2 for
    one tap.

    Raises:
        UserError: more taps than there are layers between.
    """
    if taps == 1:
        return (layers // 2,)
    ids = tuple(round(1 + i * (layers - 4) / (taps - 1)) for i in range(taps))
    if len(set(ids)) < taps or ids[0] < 0 or ids[-1] >= layers:
        raise UserError(
            f"target.taps = {taps}: a target of {layers} layers has no room for so many; set target.taps or "
            "layer_ids"
        )
    return ids


def inspect_target(config: TargetConfig) -> TargetInfo:
    """Read a target's sizes from its config alone: no weights, no network.

    Raises:
        UserError: nothing there, not a causal language model, or layer ids that it does not have.
    """
    wrapper = read_config(config)
    text = wrapper.get_text_config()
    layers = int(text.num_hidden_layers)
    ids = config.layer_ids or build_target_layer_ids(layers, config.taps)
    if list(ids) != sorted(set(ids)) or ids[-1] >= layers:
        raise UserError(
            f"target.layer_ids = {list(ids)}: must be ascending, without repeats, and below {config.model}'s "
            f"{layers} layers"
        )
    hidden = int(text.hidden_size)
    eos = getattr(text, "eos_token_id", None)
    eos = getattr(wrapper, "eos_token_id", None) if eos is None else eos
    return TargetInfo(
        model=config.model,
        family=str(wrapper.model_type),
        hidden_size=hidden,
        intermediate_size=_intermediate_size(text, hidden),
        vocab_size=int(text.vocab_size),
        layers=layers,
        layer_ids=tuple(ids),
        eos_ids=tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (int(eos),),
        pad_id=getattr(text, "pad_token_id", None),
        max_positions=int(getattr(text, "max_position_embeddings", 0) or 0),
        embedding_scale=_embedding_scale(text, hidden),
        logit_scale=_logit_scale(text),
        logit_softcap=float(getattr(text, "final_logit_softcapping", None) or 0.0),
        quantization=quantization_of(wrapper, config.devices[0], config.model),
    )


def _intermediate_size(text: Any, hidden: int) -> int:
    """The width of the MLP; families that do not name it have four times the hidden size."""
    for name in ("intermediate_size", "n_inner", "ffn_dim"):
        size = getattr(text, name, None)
        if isinstance(size, int) and size > 0:
            return size
    return 4 * hidden


def _embedding_scale(text: Any, hidden: int) -> float:
    if str(text.model_type).startswith("gemma"):
        return float(hidden**0.5)
    return float(getattr(text, "embedding_multiplier", None) or 1.0)


def _logit_scale(text: Any) -> float:
    """Cohere and Falcon-H1 multiply the logits, Granite divides them."""
    scale = getattr(text, "logit_scale", None) or getattr(text, "lm_head_multiplier", None) or 1.0
    return float(scale) / float(getattr(text, "logits_scaling", None) or 1.0)


def count_parameters(config: TargetConfig) -> int:
    """Parameters of the target's text model with its head, from the config alone (built on the meta
    device)."""
    with LOADING, torch.device("meta"):
        model = from_config(read_config(config).get_text_config())
    return sum(parameter.numel() for parameter in model.parameters())


def count_weight_bytes(config: TargetConfig, info: TargetInfo, element_bytes: int) -> int:
    """Bytes of the same on the target's device: what is quantised at its own width, the rest at
    `element_bytes`."""
    with LOADING, torch.device("meta"):
        model = from_config(read_config(config).get_text_config())
    return weight_bytes(model, info.quantization, element_bytes)


def resolve_mask_token(config: DrafterConfig, info: TargetInfo, tokenizer: Any = None) -> int:
    """The embedding row that mask slots use: the setting, else the tokenizer's `<|MASK|>`, else the family's
    known row.

    Raises:
        UserError: none is known, it lies outside the target's vocabulary, or it is a pad or end token (the
            drafter would learn to draft from a vector that means something else).
    """
    token = config.mask_token_id
    source = "drafter.mask_token_id"
    vocabulary = tokenizer.get_vocab() if tokenizer is not None else {}
    if token is None and MASK_TOKEN in vocabulary:
        token, source = int(vocabulary[MASK_TOKEN]), f"the tokenizer's {MASK_TOKEN}"
    if token is None and KNOWN_MASK_IDS.get(info.family, info.vocab_size) < info.vocab_size:
        token, source = KNOWN_MASK_IDS[info.family], f"the mask row of {info.family}"
    if token is None:
        raise UserError(
            f"no mask token known for target {info.model!r} ({info.family}): set drafter.mask_token_id to an "
            f"unused row of its embedding (0 to {info.vocab_size - 1})"
        )
    if not 0 <= token < info.vocab_size:
        raise UserError(f"{source} = {token}: outside the target's vocabulary of {info.vocab_size} rows")
    taken = {"pad": {info.pad_id, getattr(tokenizer, "pad_token_id", None)}}
    taken["end-of-text"] = {*info.eos_ids, getattr(tokenizer, "eos_token_id", None)}
    for kind, ids in taken.items():
        if token in ids:
            raise UserError(
                f"{source} = {token}: is the {kind} token; the mask needs a row that nothing else uses"
            )
    return token


def read_config(config: TargetConfig) -> Any:
    if config.model == TINY:
        return tiny_config(config)
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        wrapper = AutoConfig.from_pretrained(config.model, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise UserError(_why_unreadable(config.model, error)) from None
    if wrapper.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(
            f"target.model = {config.model!r}: {wrapper.model_type!r} is not a causal language model"
        )
    text = wrapper.get_text_config()
    missing = [
        key for key in ("num_hidden_layers", "hidden_size", "vocab_size") if getattr(text, key, None) is None
    ]
    if missing:
        raise UserError(
            f"target.model = {config.model!r}: its config names no {missing[0]}; not a causal language model"
        )
    return wrapper


def _why_unreadable(model: str, error: Exception) -> str:
    folder = Path(model)
    if folder.is_dir():
        if not (folder / "config.json").exists():
            return f"target.model = {model!r}: the folder has no config.json"
        return f"target.model = {model!r}: its config.json cannot be used: {first_line(error)}"
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        return (
            f"target.model = {model!r}: no such folder; a path, a Hugging Face id (owner/name) or {TINY!r} "
            "is expected"
        )
    return (
        f"target.model = {model!r}: not in the local Hugging Face cache; download it first: hf download "
        f"{model}"
    )


def first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


def from_config(text_config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(text_config)


def tiny_config(config: TargetConfig) -> Any:
    from transformers import Qwen3_5TextConfig

    tiny = config.tiny
    kinds = [
        "full_attention" if (i + 1) % tiny.full_attention_interval == 0 else "linear_attention"
        for i in range(tiny.layers)
    ]
    return Qwen3_5TextConfig(
        vocab_size=tiny.vocab_size,
        hidden_size=tiny.hidden_size,
        intermediate_size=tiny.intermediate_size,
        num_hidden_layers=tiny.layers,
        num_attention_heads=tiny.heads,
        num_key_value_heads=tiny.kv_heads,
        head_dim=tiny.head_dim,
        linear_num_key_heads=tiny.linear_heads,
        linear_num_value_heads=tiny.linear_heads,
        linear_key_head_dim=tiny.linear_head_dim,
        linear_value_head_dim=tiny.linear_head_dim,
        layer_types=kinds,
        # Rows of the embedding, which is also the head, of length one: a drafter can then say what it is sure
        # of.
        initializer_range=tiny.hidden_size**-0.5,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    )
