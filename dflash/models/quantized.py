"""Quantised targets: what their config says, how they are loaded, and their embedding and head in full.

transformers loads each method by itself; the layers' own arithmetic is never touched. The drafter shares the
target's embedding and head, so those two are wanted as plain matrices, whatever they are stored as."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from steptime.errors import UserError

_FULL = (torch.float32, torch.bfloat16, torch.float16)
_ROWS = 1024
"""Rows of an embedding, or columns of a head, that are made at one time."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a target's weights are stored.

    Attributes:
        method: transformers' name of it.
        bits: of a quantised weight in the device's memory, its group's scales included; None: it is widened
            to the target's type when it is loaded, or nobody knows.
        dtype: the type that the rest was saved in; empty: unknown.
        skipped: modules that are not quantised, as patterns of names; None: the method's default, which is
            the head and what is tied to it.
        experts, linears: whether it quantises the experts of a mixture, and linear layers.
        why: why they are widened, or how sure the bits are; for the dry run.
    """

    method: str
    bits: float | None
    dtype: str = ""
    skipped: tuple[str, ...] | None = None
    experts: bool = False
    linears: bool = True
    why: str = ""


def quantization_of(config: Any, device: str, model: str = "") -> Quantization | None:
    """What `quantization_config` of a model's config says; None: not quantised.

    Args:
        config: transformers' configuration of the whole model.
        device: the target's.
        model: its name, for the error.

    Raises:
        UserError: it is not what any method writes.
    """
    try:
        return _read(config, device)
    except (AttributeError, TypeError, ValueError, ArithmeticError, re.error) as error:
        raise UserError(
            f"target.model = {model!r}: quantization_config of its config.json cannot be read: {error}"
        ) from None


def _read(config: Any, device: str) -> Quantization | None:
    tree = getattr(config, "quantization_config", None)
    if tree is None:
        tree = getattr(config.get_text_config(), "quantization_config", None)
    if tree is None:
        return None
    settings: Mapping[str, Any] = tree if isinstance(tree, Mapping) else tree.to_dict()
    method = str(settings.get("quant_method") or "")
    bits, why = _bits(method, settings, device.startswith("cuda"))
    skipped = settings.get("modules_to_not_convert")
    skipped = settings.get("llm_int8_skip_modules") if skipped is None else skipped
    if skipped is None and settings.get("include_input_output_embeddings"):
        skipped = ()
    return Quantization(
        method=method,
        bits=bits,
        dtype=str(getattr(config, "dtype", None) or "").removeprefix("torch."),
        skipped=None if skipped is None else tuple(re.compile(name).pattern for name in skipped),
        experts=method in ("fp8", "mxfp4"),
        linears=method != "mxfp4",
        why=why,
    )


def _bits(method: str, settings: Mapping[str, Any], on_gpu: bool) -> tuple[float | None, str]:
    """Bits of a weight in memory, and what there is to say of them."""
    if method in ("fp8", "mxfp4"):
        if not on_gpu:
            return None, "a CPU has no kernels for it"
        rows, columns = settings.get("weight_block_size") or (128, 128)
        lacking = "where the GPU or the kernels for it are missing, transformers widens them"
        return (8.0 + 32.0 / (rows * columns) if method == "fp8" else 4.0 + 8.0 / 32.0), lacking
    if method == "compressed-tensors":
        return None, "transformers computes with the widened weights"
    if method == "bitsandbytes":
        if not settings.get("load_in_4bit"):
            return 8.0, ""
        # A float32 scale for 64 weights; with double quantisation 8 bits, and a float32 for 256 of those.
        double = settings.get("bnb_4bit_use_double_quant")
        return 4.0 + (8.0 / 64 + 32.0 / (64 * 256) if double else 32.0 / 64), ""
    if method == "torchao":
        return _torchao_bits(settings)
    known = settings.get("bits") or settings.get("w_bit")
    return (float(known), "scales not counted") if isinstance(known, int) else (None, "their size is unknown")


def _torchao_bits(settings: Mapping[str, Any]) -> tuple[float | None, str]:
    kind = settings.get("quant_type") or {}
    kind = kind.get("default", kind) if isinstance(kind, Mapping) else {"_type": str(kind)}
    name, data = str(kind.get("_type", "")).lower(), kind.get("_data") or {}
    if re.search(r"int4weight", name):
        # A scale and a zero of 16 bits for each group.
        return 4.0 + 32.0 / int(data.get("group_size") or 128), ""
    if "intx" in name:
        # Any width lies unpacked in bytes; a float32 scale and a byte of zero for each group.
        group = ((data.get("granularity") or {}).get("_data") or {}).get("group_size")
        return 8.0 + (40.0 / int(group) if group else 0.0), ""
    if re.search(r"int8|float8|fp8", name):
        return 8.0, ""
    return None, "their size is unknown"


def weight_bytes(model: Any, quantization: Quantization | None, element_bytes: int) -> int:
    """Bytes of a model's weights on its device.

    Args:
        model: not quantised, on the meta device.
        element_bytes: of a weight that is not quantised.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    if quantization is None or quantization.bits is None:
        return total * element_bytes
    quantised = _quantised(model, quantization)
    small = sum(parameter.numel() for parameter in quantised)
    # A quantised head is also kept in full, for the drafter.
    head = model.get_output_embeddings().weight
    full = head.numel() if any(head is one for one in quantised) else 0
    return (total - small + full) * element_bytes + round(small * quantization.bits / 8)


def _quantised(model: Any, quantization: Quantization) -> list[torch.Tensor]:
    """The parameters that are stored small."""
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    skipped = None if quantization.skipped is None else list(quantization.skipped)
    kept = HfQuantizer.get_modules_to_not_convert(model, skipped)
    found: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if not should_convert_module(name, kept):
            continue
        if isinstance(module, nn.Linear) and quantization.linears:
            found.append(module.weight)
        elif name.endswith("experts") and quantization.experts:
            found += [one for one in module.parameters(recurse=False) if one.dim() == 3]
    return found


def load_options(quantization: Quantization | None, device: torch.device) -> dict[str, Any]:
    """What `from_pretrained` is told of a quantised model.

    Raises:
        ImportError: the method's library is not installed.
    """
    if quantization is None:
        return {}
    options: dict[str, Any] = {}
    if quantization.method == "compressed-tensors":
        from transformers import CompressedTensorsConfig

        # Else it widens them in the first pass, when several threads may run.
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    # It else logs in each layer of each pass that it computes in float16.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    if find_spec("accelerate") is not None:
        # Some methods pack for the device that they load onto.
        options["device_map"] = {"": torch.device("cpu") if device.type == "cpu" else device}
    return options


@torch.no_grad()
def check_runs(model: Any, name: str, quantization: Quantization, dtype: str) -> None:
    """Refuse a quantised model that cannot run here, before a worker meets it.

    Raises:
        UserError: with what the model's first pass says.
    """
    try:
        model(input_ids=torch.ones(1, 2, dtype=torch.int64, device=model.device), use_cache=False)
    except Exception as error:
        saved = quantization.dtype
        other = f"; it was saved in {saved}: try target.dtype = {saved}" if saved not in ("", dtype) else ""
        raise UserError(
            f"target.model = {name!r}: quantised ({quantization.method}), and a pass in {dtype} on "
            f"{model.device} fails: {(str(error) or type(error).__name__).splitlines()[0][:200]}{other}"
        ) from None


def is_full(module: nn.Module) -> bool:
    """Whether its weight is a plain matrix."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and type(weight.data) is torch.Tensor and weight.dtype in _FULL


def full_dtype(model: nn.Module) -> torch.dtype:
    """The type of what a model does not quantise."""
    kinds = (one.dtype for one in model.parameters() if type(one.data) is torch.Tensor and one.dtype in _FULL)
    return next(kinds, torch.float32)


@torch.no_grad()
def full_embedding(module: nn.Module, rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`[rows, H]`: what an embedding reads for each id; its weight itself where that is a matrix."""
    if is_full(module):
        weight: torch.Tensor = module.weight  # type: ignore[assignment]
        return weight
    ids = torch.arange(int(getattr(module, "num_embeddings", rows)), device=device)
    return torch.cat([module(part).to(dtype) for part in ids.split(_ROWS)])


@torch.no_grad()
def full_head(module: nn.Module, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`[V, H]`: what a head of `width` H makes of each unit vector, its bias left out; its weight itself
    where that is a matrix."""
    if is_full(module):
        weight: torch.Tensor = module.weight  # type: ignore[assignment]
        return weight
    units = torch.eye(width, dtype=dtype, device=device)
    columns = torch.cat([module(part).to(dtype) for part in units.split(_ROWS)])
    bias = getattr(module, "bias", None)
    return (columns if bias is None else columns - bias).T.contiguous()


def shared_tensors(model: nn.Module) -> dict[int, Any]:
    """The tensors of a model as a memo for `copy.deepcopy`, which then shares them: parameters, buffers, and
    what a method keeps beside its weight from the first pass on (bitsandbytes: `state.CB`)."""
    found: dict[int, Any] = {id(one): one for one in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        for value in vars(module).values():
            inner = vars(value).values() if hasattr(value, "__dict__") else ()
            found |= {id(one): one for one in (value, *inner) if isinstance(one, torch.Tensor)}
    return found
