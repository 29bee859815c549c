"""A checkpoint written so that others load it: z-lab, SGLang and vLLM, or speculators. Nothing unchecked
appears on disk.

Reference 2.1. Before the folder gets its name, it is read back: every tensor's name, shape and type, the
config against the target's, and a round trip, in which the drafter loaded afresh must give the same logits as
the one that was written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dflash.models.drafter import DrafterShape
from dflash.models.target import TargetInfo
from dflash.release.released import (
    COMPUTING,
    build_drafter,
    check_against_target,
    check_tensors,
    load_released,
    said_scales,
)
from dflash.release.released_config import FULL, SCALES, SLIDING
from steptime.errors import UserError, nearest
from steptime.files import atomic_folder

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        tensors, bytes: how many and how much.
        probes: logits compared in the round trip, all equal.
    """

    path: Path
    format: str
    tensors: int
    bytes: int
    probes: int


def export(
    shape: DrafterShape,
    tensors: Mapping[str, torch.Tensor],
    info: TargetInfo,
    out: str | Path,
    *,
    format: str = "zlab",
    auto_map: bool = False,
    taken_ids: frozenset[int] = frozenset(),
) -> Exported:
    """Write a drafter in bfloat16 and prove what was written.

    Args:
        tensors: the drafter's, in any type.
        info: the target it was trained for.
        out: a folder that does not exist yet, or is empty.
        format: `zlab` (also for SGLang and vLLM) or `speculators`.
        auto_map: name z-lab's class for Hugging Face's remote code; leave it out for SGLang.
        taken_ids: tokens that the mask must not be: the tokenizer's pad and end.

    Raises:
        UserError: tensors or sizes that do not fit, or a folder with something in it.
    """
    out = Path(out)
    if format not in FORMATS:
        raise UserError(f"--format {format}: must be {' or '.join(FORMATS)}{nearest(format, FORMATS)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists already; give a new folder")
    check_against_target(shape, info, "the drafter", taken_ids)
    if shape.target_layer_ids[-1] == info.layers - 1:
        raise UserError(
            f"the drafter taps layer {info.layers - 1}, the target's last: loaders that read transformers' "
            "hidden_states get its "
            "normed output, not what the drafter was trained on; choose target.layer_ids below it"
        )
    check_tensors(tensors, shape, "the drafter")
    rounded = {name: tensor.to(DTYPE).contiguous() for name, tensor in tensors.items()}
    config = FORMATS[format](shape, info, auto_map)
    if out.exists():
        out.rmdir()
    with atomic_folder(out) as folder:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
        probes = _prove(folder, shape, rounded, info, taken_ids)
        size = (folder / "model.safetensors").stat().st_size
    return Exported(out, format, len(rounded), size, probes)


def zlab_config(shape: DrafterShape, info: TargetInfo, auto_map: bool = False) -> dict[str, Any]:
    """The `config.json` that z-lab's package, SGLang and vLLM read.

    Rope in both spellings (transformers 5 writes only `rope_parameters`, the engines read either), the block
    size in both places. No `is_causal`: vLLM reads it before the layer types, and false would make sliding
    layers bidirectional."""
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": shape.block_size,
        "dflash_config": {
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.target_layer_ids),
            "block_size": shape.block_size,
            **{SCALES[name]: value for name, value in said_scales(shape).items()},
        },
        "num_target_layers": shape.target_layers or info.layers,
        **_transformer(shape, info),
    }
    if auto_map:
        config["auto_map"] = {"AutoModel": "dflash.DFlashDraftModel"}
    return config


def speculators_config(shape: DrafterShape, info: TargetInfo, auto_map: bool = False) -> dict[str, Any]:
    """The `config.json` of speculators 0.9: its layer ids number the inputs of layers, so they are one
    higher."""
    from transformers import AutoConfig

    for name, value in said_scales(shape).items():
        raise UserError(
            f"--format speculators: the drafter follows its target's {SCALES[name]} of {value:g}, and that "
            "form has no place for it; choose zlab"
        )
    architectures: list[str] = []
    if Path(info.model).is_dir():
        config = AutoConfig.from_pretrained(info.model, local_files_only=True, trust_remote_code=False)
        architectures = config.architectures or []
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "aux_hidden_state_layer_ids": [i + 1 for i in shape.target_layer_ids],
        "block_size": shape.block_size,
        "draft_vocab_size": shape.vocab_size,
        "mask_token_id": shape.mask_token_id,
        "num_target_layers": shape.target_layers or info.layers,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": shape.block_size - 1}],
            "verifier": {"name_or_path": info.model, "architectures": architectures},
        },
        "transformer_layer_config": {"model_type": "qwen3", **_transformer(shape, info)},
    }


def _transformer(shape: DrafterShape, info: TargetInfo) -> dict[str, Any]:
    """Plain Qwen3, whatever the target's rotary embedding and head sizes are."""
    sliding = shape.sliding_layers
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": info.max_positions or 32768,
        "layer_types": [SLIDING] * sliding + [FULL] * (shape.layers - sliding),
        "sliding_window": shape.sliding_window if sliding else None,
        "use_sliding_window": bool(sliding),
        "max_window_layers": shape.layers,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": info.eos_ids[0] if info.eos_ids else None,
        "use_cache": True,
    }


FORMATS: dict[str, Callable[[DrafterShape, TargetInfo, bool], dict[str, Any]]] = {
    "zlab": zlab_config,
    "speculators": speculators_config,
}


def _prove(
    folder: Path,
    shape: DrafterShape,
    rounded: Mapping[str, torch.Tensor],
    info: TargetInfo,
    taken_ids: frozenset[int],
) -> int:
    """Read back what was written; returns how many logits were compared.

    Raises:
        UserError: anything that came back other than it was meant.
    """
    check_tensors(load_file(folder / "model.safetensors"), shape, "the export", DTYPE)
    read, tensors = load_released(folder)
    check_against_target(read, info, "the export", taken_ids)
    wrong = [name for name in released_fields(shape) if getattr(read, name) != getattr(shape, name)]
    if wrong:
        name = wrong[0]
        raise UserError(
            f"the export: its config says {name} {getattr(read, name)}, the drafter has "
            f"{getattr(shape, name)}"
        )
    before, after = probe(shape, rounded), probe(read, tensors)
    if not torch.equal(before, after):
        raise UserError("the export: loaded afresh it gives other logits than the drafter that was written")
    return before.numel()


def released_fields(shape: DrafterShape) -> list[str]:
    """Fields of a shape that a release must carry."""
    hidden = (
        COMPUTING
        | (set() if shape.sliding_layers else {"sliding_window"})
        | (set() if shape.target_layers else {"target_layers"})
    )
    return [name for name in shape.__dataclass_fields__ if name not in hidden]


@torch.no_grad()
def probe(shape: DrafterShape, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Logits of two blocks over a random text, float32 `[2, B-1, 64]`.

    Embedding and head are the target's and no part of the release: a small random pair stands for them.
    """
    generator = torch.Generator().manual_seed(0)
    rows, context = 64, 24
    small = replace(shape, vocab_size=rows, mask_token_id=shape.mask_token_id % rows, attention="dense")
    drafter = build_drafter(small, tensors, torch.device("cpu"), torch.float32)
    features = torch.randn(1, context, shape.taps * shape.hidden_size, generator=generator)
    embedding = torch.randn(rows, shape.hidden_size, generator=generator) * 0.05
    head = torch.randn(rows, shape.hidden_size, generator=generator)
    ids = torch.randint(0, rows, (1, context), generator=generator)
    anchors = torch.tensor([[7, context - 2]])
    kept = torch.ones_like(anchors, dtype=torch.bool)
    return (drafter(features, ids, anchors, kept, torch.zeros_like(anchors), embedding) @ head.T)[0]
