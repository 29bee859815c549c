"""Small random targets as people bring them quantised: each kind is written to a folder as its own tools
would write it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.decode.parts import shaken
from tests.models.families import PLAIN, build_of

SETTINGS = PLAIN | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """A way of storing weights.

    Attributes:
        make: writes a target into a folder.
        needs: packages without which transformers does not load it.
        widened: transformers widens its weights on a CPU.
        ties: how it rounds a row depends on the other rows of a pass.
    """

    make: Callable[[Path], None]
    needs: tuple[str, ...]
    widened: bool = False
    ties: bool = False


def plain(folder: Path, family: str = "LlamaConfig", **settings: Any) -> None:
    shaken(build_of(family, SETTINGS | settings)).save_pretrained(folder)


def by_transformers(config: Callable[[], Any]) -> Callable[[Path], None]:
    """Quantised by transformers when it loads the plain target, and saved."""

    def make(folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        plain(folder)
        load: Any = AutoModelForCausalLM.from_pretrained
        load(folder, quantization_config=config(), dtype=torch.float32).save_pretrained(folder)

    return make


def by_hand(
    settings: dict[str, Any], convert: Callable[[str, torch.Tensor], Tensors]
) -> Callable[[Path], None]:
    """The layers' matrices converted one by one, as the published checkpoints have them."""

    def make(folder: Path) -> None:
        plain(folder)
        tensors: Tensors = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            tensors |= convert(name, tensor) if "_proj.weight" in name else {name: tensor}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        say(folder, settings)

    return make


def stored_bytes(target: Any) -> int:
    """Memory of a target's weights with their scales, and of its embedding and head in full."""
    found: dict[int, int] = {}

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor) and type(value.data) is not torch.Tensor:
            for name in value.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
                walk(getattr(value, name))
        elif isinstance(value, torch.Tensor):
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        for name in ("state", "quant_state"):  # bitsandbytes
            state = getattr(value, name, None)
            for inner in vars(state).values() if hasattr(state, "__dict__") else ():
                walk(inner)

    for module in target.model.modules():
        for value in (module, *module.parameters(recurse=False), *module.buffers(recurse=False)):
            walk(value)
    for value in (target.embedding, target.head):
        walk(value)
    return sum(found.values())


def say(folder: Path, settings: dict[str, Any]) -> None:
    """Write `quantization_config` into a folder's config.json."""
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(tree | {"quantization_config": settings}))


def torchao(name: str, **settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        import torchao.quantization
        from transformers import TorchAoConfig

        inner = {key: value() if callable(value) else value for key, value in settings.items()}
        both = {"include_input_output_embeddings": True} if inner.pop("ends", False) else {}
        return TorchAoConfig(getattr(torchao.quantization, name)(**inner), **both)

    return make


def groups_of_32() -> Any:
    from torchao.quantization.granularity import PerGroup

    return PerGroup(32)


def bitsandbytes(**settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(**settings)

    return make


def _blocks_of_fp8(name: str, weight: torch.Tensor) -> Tensors:
    scale = weight.abs().max() / 448.0  # one block holds all of it
    return {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale.reshape(1, 1)}


def _rows_of_fp8(name: str, weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / 448.0
    return {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}


def _rows_of_int8(name: str, weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / 127.0
    return {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale}


def _groups_of_int4(name: str, weight: torch.Tensor) -> Tensors:
    groups = weight.reshape(weight.shape[0], -1, 32)
    scale = groups.abs().amax(2, keepdim=True) / 7.0
    codes = ((groups / scale).round().clamp(-8, 7) + 8).reshape(weight.shape).to(torch.int32)
    packed = sum(codes[:, place::8] << (4 * place) for place in range(8))
    assert isinstance(packed, torch.Tensor)
    shape = torch.tensor(weight.shape)
    return {f"{name}_packed": packed, f"{name}_scale": scale[..., 0], f"{name}_shape": shape}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "format": form, "weights": {"symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _mxfp4(folder: Path) -> None:
    """gpt-oss as it is published: random codes of four bits, a scale for 32 of them."""
    plain(folder, "GptOssConfig", num_local_experts=4, num_experts_per_tok=2)
    tensors: Tensors = {}
    draws = torch.Generator().manual_seed(3)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = tensor
            continue
        experts, inside, outside = tensor.shape
        shape = (experts, outside, inside // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=draws)
        tensors[f"{name}_scales"] = torch.full(shape, 127 - 4, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    say(folder, {"quant_method": "mxfp4", "modules_to_not_convert": kept})


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
ACCELERATE, BNB = ("accelerate",), ("accelerate", "bitsandbytes")
CT = ("accelerate", "compressed_tensors")
KINDS = {
    "torchao int8": Kind(by_transformers(torchao("Int8WeightOnlyConfig")), ("torchao",)),
    "torchao int8, the head too": Kind(
        by_transformers(torchao("Int8WeightOnlyConfig", ends=True)), ("torchao",)
    ),
    "torchao int8, activations too": Kind(
        by_transformers(torchao("Int8DynamicActivationInt8WeightConfig")), ("torchao",)
    ),
    "torchao int4": Kind(
        by_transformers(
            torchao("IntxWeightOnlyConfig", weight_dtype=lambda: torch.int4, granularity=groups_of_32)
        ),
        ("torchao",),
    ),
    "torchao float8": Kind(by_transformers(torchao("Float8WeightOnlyConfig")), ("torchao",)),
    "bitsandbytes int8": Kind(by_transformers(bitsandbytes(load_in_8bit=True)), BNB, ties=True),
    "bitsandbytes int4": Kind(by_transformers(bitsandbytes(load_in_4bit=True)), BNB),
    "fp8": Kind(by_hand(FP8, _blocks_of_fp8), ACCELERATE, widened=True),
    "mxfp4": Kind(_mxfp4, ACCELERATE, widened=True),
    "compressed-tensors int8": Kind(
        by_hand(compressed("int-quantized", num_bits=8, type="int", strategy="channel"), _rows_of_int8),
        CT,
        widened=True,
    ),
    "compressed-tensors int4": Kind(
        by_hand(
            compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32),
            _groups_of_int4,
        ),
        CT,
        widened=True,
    ),
    "compressed-tensors float8": Kind(
        by_hand(compressed("float-quantized", num_bits=8, type="float", strategy="channel"), _rows_of_fp8),
        CT,
        widened=True,
    ),
}
FAST = ("torchao int8",)
