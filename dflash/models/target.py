"""The frozen target: loaded through transformers, tapped by hooks, stopped after the last tapped layer.

A tap `j` is the output of decoder layer `j` (transformers calls it `hidden_states[j + 1]`; engines that number the inputs
of layers call it `j + 1`). Reference 1.3, 1.4 and 7.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dflash.config import DrafterConfig, TargetConfig
from dflash.device import Device, torch_dtype
from dflash.errors import UserError

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
# Layer kinds whose masks the taps can do without: causal, no matter what is right of the sample.
_MASK_FREE_LAYERS = {"full_attention", "sliding_attention", "linear_attention"}
_MASK_FREE = "dflash_causal"
# transformers builds models under process-wide patches, and the seeded target borrows the global generator.
_LOADING = threading.Lock()


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What is known of a target without its weights.

    Attributes:
        family: transformers' `model_type` of the text model's wrapper.
        layer_ids: the tapped layers, ascending.
        eos_ids, pad_id: from the config; the tokenizer may know others.
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


def build_target_layer_ids(layers: int, taps: int) -> tuple[int, ...]:
    """`taps` layers from layer 1 to layer L-3, evenly spaced (paper 4.1): round(1 + i (L-4)/(n-1)); L//2 for one tap.

    Raises:
        UserError: more taps than there are layers between.
    """
    if taps == 1:
        return (layers // 2,)
    ids = tuple(round(1 + i * (layers - 4) / (taps - 1)) for i in range(taps))
    if len(set(ids)) < taps or ids[0] < 0 or ids[-1] >= layers:
        raise UserError(
            f"target.taps = {taps}: a target of {layers} layers has no room for so many; set target.taps or layer_ids"
        )
    return ids


def inspect_target(config: TargetConfig) -> TargetInfo:
    """Read a target's sizes from its config alone: no weights, no network.

    Raises:
        UserError: nothing there, not a causal language model, or layer ids that it does not have.
    """
    wrapper = _read_config(config)
    text = wrapper.get_text_config()
    layers = int(text.num_hidden_layers)
    ids = config.layer_ids or build_target_layer_ids(layers, config.taps)
    if list(ids) != sorted(set(ids)) or ids[-1] >= layers:
        raise UserError(
            f"target.layer_ids = {list(ids)}: must be ascending, without repeats, and below {config.model}'s {layers} layers"
        )
    eos = getattr(text, "eos_token_id", None)
    eos = getattr(wrapper, "eos_token_id", None) if eos is None else eos
    return TargetInfo(
        model=config.model,
        family=str(wrapper.model_type),
        hidden_size=int(text.hidden_size),
        intermediate_size=int(getattr(text, "intermediate_size", None) or 0),
        vocab_size=int(text.vocab_size),
        layers=layers,
        layer_ids=tuple(ids),
        eos_ids=tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (int(eos),),
        pad_id=getattr(text, "pad_token_id", None),
        max_positions=int(getattr(text, "max_position_embeddings", 0) or 0),
    )


def count_parameters(config: TargetConfig) -> int:
    """Parameters of the target's text model with its head, from the config alone (built on the meta device)."""
    with _LOADING, torch.device("meta"):
        model = _from_config(_read_config(config).get_text_config())
    return sum(parameter.numel() for parameter in model.parameters())


def resolve_mask_token(config: DrafterConfig, info: TargetInfo, tokenizer: Any = None) -> int:
    """The embedding row that mask slots use: the setting, else the tokenizer's `<|MASK|>`, else the family's known row.

    Raises:
        UserError: none is known, it lies outside the target's vocabulary, or it is a pad or end token (the drafter would
            learn to draft from a vector that means something else).
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
            f"no mask token known for target {info.model!r} ({info.family}): set drafter.mask_token_id to an unused row "
            f"of its embedding (0 to {info.vocab_size - 1})"
        )
    if not 0 <= token < info.vocab_size:
        raise UserError(f"{source} = {token}: outside the target's vocabulary of {info.vocab_size} rows")
    taken = {"pad": {info.pad_id, getattr(tokenizer, "pad_token_id", None)}}
    taken["end-of-text"] = {*info.eos_ids, getattr(tokenizer, "eos_token_id", None)}
    for kind, ids in taken.items():
        if token in ids:
            raise UserError(f"{source} = {token}: is the {kind} token; the mask needs a row that nothing else uses")
    return token


@dataclass(frozen=True, slots=True)
class DocumentRows:
    """Packed rows taken apart: every document in a row of its own, and the way back. Made on the host.

    Attributes:
        gather: int64 `[documents, longest]` places in the flattened batch; past a document's end, its last place again.
        scatter: int64 `[batch * length]` places in the flattened rows.
    """

    gather: torch.Tensor
    scatter: torch.Tensor

    @staticmethod
    def split(document_ids: np.ndarray) -> DocumentRows:
        """From int `[batch, length]` document ids, ascending within a row; any value on padding."""
        batch, length = document_ids.shape
        starts = np.ones((batch, length), bool)
        starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
        first = np.flatnonzero(starts)
        sizes = np.diff(np.append(first, batch * length))
        offsets = np.arange(sizes.max())
        gather = first[:, None] + np.minimum(offsets, sizes[:, None] - 1)
        row = np.cumsum(starts) - 1
        scatter = row * len(offsets) + np.arange(batch * length) - first[row]
        return DocumentRows(torch.from_numpy(gather), torch.from_numpy(scatter))

    def to(self, device: torch.device) -> DocumentRows:
        """On `device`; from pinned memory without a wait."""
        return DocumentRows(self.gather.to(device, non_blocking=True), self.scatter.to(device, non_blocking=True))


class _LastTapTaken(Exception):
    """Ends the forward pass: nothing after the last tapped module is needed."""


class Target:
    """A frozen causal language model with taps. One thread uses it at a time.

    Attributes:
        model: transformers' causal language model, for generation; `text_model` its decoder.
        embedding, head: `[V, H]` weights, frozen; the same tensor where the model ties them.
    """

    def __init__(self, model: Any, info: TargetInfo, device: Device) -> None:
        self.model = model.requires_grad_(False).eval()
        self.text_model = _find_decoder(model)
        self.info = info
        self.device = device
        self.layer_ids = info.layer_ids
        self.embedding: torch.Tensor = model.get_input_embeddings().weight
        self.head: torch.Tensor = model.get_output_embeddings().weight
        self._taken: list[torch.Tensor] | None = None
        self._stop_after: nn.Module | None = None
        kinds = set(getattr(self.text_model.config, "layer_types", None) or ["full_attention"])
        self._mask_free = kinds <= _MASK_FREE_LAYERS
        for layer_id in self.layer_ids:
            self.text_model.layers[layer_id].register_forward_hook(self._take)
        self._last_layer: nn.Module = self.text_model.layers[self.layer_ids[-1]]
        self.text_model.norm.register_forward_hook(self._take_last)

    def taps(self, input_ids: torch.Tensor, documents: DocumentRows | None = None) -> tuple[torch.Tensor, ...]:
        """The tapped hidden states of right-padded rows.

        No attention mask is passed: what is right of a token never reaches it, and building a mask reads device values.
        The rows end in states of padding that nobody may use.

        Args:
            input_ids: int64 `[batch, length]` on the target's device.
            documents: for packed rows; every document then runs as if alone, in attention and in recurrent state alike.

        Returns:
            One `[batch, length, H]` tensor for each of `layer_ids`, in the target's dtype, without a graph.
        """
        return tuple(self._run(input_ids, documents, self._last_layer))

    def taps_and_last(
        self, input_ids: torch.Tensor, documents: DocumentRows | None = None
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """`taps`, and the normed last hidden state `[batch, length, H]`: `last @ head.T` are the target's logits."""
        *taps, last = self._run(input_ids, documents, self.text_model.norm)
        return tuple(taps), last

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[torch.Tensor]]:
        """Collect the taps of passes made through `self.model` inside, in call order, without stopping them."""
        taken: list[torch.Tensor] = []
        self._taken = taken
        try:
            yield taken
        finally:
            self._taken = None

    def _run(self, input_ids: torch.Tensor, documents: DocumentRows | None, stop_after: nn.Module) -> list[torch.Tensor]:
        shape = input_ids.shape
        if documents is not None:
            input_ids = input_ids.reshape(-1)[documents.gather]
        taken: list[torch.Tensor] = []
        self._taken, self._stop_after = taken, stop_after
        try:
            with torch.no_grad(), self._without_masks():
                self.text_model(input_ids=input_ids, use_cache=False)
        except _LastTapTaken:
            pass
        finally:
            self._taken = self._stop_after = None
        if documents is not None:
            taken = [tap.flatten(0, 1)[documents.scatter].view(*shape, -1) for tap in taken]
        return taken

    @contextlib.contextmanager
    def _without_masks(self) -> Iterator[None]:
        """Let attention be causal by itself; transformers else looks at the position ids' values on the host."""
        config = self.text_model.config
        before = config._attn_implementation
        if not self._mask_free or before != "sdpa":
            yield
            return
        config._attn_implementation_internal = _MASK_FREE
        try:
            yield
        finally:
            config._attn_implementation_internal = before

    def _take(self, module: nn.Module, _: Any, output: Any) -> None:
        if self._taken is None:
            return
        self._taken.append(output[0] if isinstance(output, tuple) else output)
        if module is self._stop_after:
            raise _LastTapTaken

    def _take_last(self, module: nn.Module, _: Any, output: torch.Tensor) -> None:
        if self._taken is not None and module is self._stop_after:
            self._taken.append(output)
            raise _LastTapTaken


def load_target(config: TargetConfig, device: Device, info: TargetInfo | None = None) -> Target:
    """Load a target's weights onto a device, frozen.

    Raises:
        UserError: as `inspect_target`, or weights that are missing or do not fit.
    """
    info = info or inspect_target(config)
    dtype = torch_dtype(config.dtype)
    _quieten()
    with _LOADING:
        model = build_tiny(config, dtype) if config.model == TINY else _from_pretrained(config.model, dtype)
    return Target(model.to(device.torch), info, device)


def build_tiny(config: TargetConfig, dtype: torch.dtype = torch.float32) -> Any:
    """The built-in target with weights from `tiny.seed`: a transformers model, the same whatever was drawn before."""
    from transformers import Qwen3_5ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.tiny.seed)
        model: Any = Qwen3_5ForCausalLM(_tiny_config(config))
    return model.to(dtype)


def save_target(model: Any, path: str | Path) -> None:
    """Write a (trained) target as a Hugging Face folder; `target.model = path` loads it again."""
    _quieten()
    model.save_pretrained(str(path))


def _tiny_config(config: TargetConfig) -> Any:
    from transformers import Qwen3_5TextConfig

    tiny = config.tiny
    kinds = ["full_attention" if (i + 1) % tiny.full_attention_interval == 0 else "linear_attention" for i in range(tiny.layers)]
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
        # Rows of the embedding, which is also the head, of length one: a drafter can then say what it is sure of.
        initializer_range=tiny.hidden_size**-0.5,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    )


def _read_config(config: TargetConfig) -> Any:
    if config.model == TINY:
        return _tiny_config(config)
    from transformers import AutoConfig

    try:
        wrapper = AutoConfig.from_pretrained(config.model, local_files_only=True)
    except Exception as error:
        raise UserError(_why_unreadable(config.model, error)) from None
    text = wrapper.get_text_config()
    missing = [key for key in ("num_hidden_layers", "hidden_size", "vocab_size") if getattr(text, key, None) is None]
    if missing:
        raise UserError(f"target.model = {config.model!r}: its config names no {missing[0]}; not a causal language model")
    return wrapper


def _why_unreadable(model: str, error: Exception) -> str:
    folder = Path(model)
    if folder.is_dir():
        if not (folder / "config.json").exists():
            return f"target.model = {model!r}: the folder has no config.json"
        return f"target.model = {model!r}: its config.json cannot be used: {_first_line(error)}"
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        return f"target.model = {model!r}: no such folder; a path, a Hugging Face id (owner/name) or {TINY!r} is expected"
    return f"target.model = {model!r}: not in the local Hugging Face cache; download it first: hf download {model}"


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


def _from_config(text_config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(text_config)


def _from_pretrained(model: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        loaded, report = load(model, dtype=dtype, local_files_only=True, attn_implementation="sdpa", output_loading_info=True)
    except Exception as error:
        raise UserError(f"target.model = {model!r}: cannot load its weights: {_first_line(error)}") from None
    lost = sorted([*report.get("missing_keys", ()), *(str(item[0]) for item in report.get("mismatched_keys", ()))])
    if lost:
        raise UserError(f"target.model = {model!r}: {len(lost)} tensors are missing or misshapen, first {lost[0]!r}")
    return loaded


def _find_decoder(model: Any) -> Any:
    """The text decoder inside any wrapper: the module that owns the layers and the final norm."""
    layers = int(model.config.get_text_config().num_hidden_layers)
    for _, module in model.named_modules():
        stack = getattr(module, "layers", None)
        if isinstance(stack, nn.ModuleList) and len(stack) == layers and hasattr(module, "embed_tokens"):
            if not hasattr(module, "norm"):
                break
            return module
    raise UserError(f"target {type(model).__name__}: found no decoder with embed_tokens, {layers} layers and norm to tap")


def _mask_free_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: None, **kwargs: Any
) -> Any:
    """transformers' SDPA, causal without a mask; a sliding layer gets its band, built from shapes alone."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    window = kwargs.get("sliding_window")
    length = query.shape[2]
    if window is not None and window < length:
        place = torch.arange(length, device=query.device)
        distance = place[:, None] - place[None, :]
        attention_mask = ((distance >= 0) & (distance < window))[None, None]
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _register_mask_free() -> None:
    from transformers import AttentionInterface

    register: Callable[[str, Any], None] = AttentionInterface.register
    register(_MASK_FREE, _mask_free_attention)


def _quieten() -> None:
    """Keep transformers' word on missing kernels, which `dflash doctor` says, and its progress bars out of the run."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    logger = logging.getLogger("transformers.integrations.hub_kernels")
    if not any(isinstance(item, _NoFallbackChatter) for item in logger.filters):
        logger.addFilter(_NoFallbackChatter())
    _register_mask_free()


class _NoFallbackChatter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return "falling back" not in record.getMessage()


def stack_taps(taps: Sequence[torch.Tensor]) -> torch.Tensor:
    """`[batch, length, K*H]`: the taps side by side along channels, in the order of the layer ids."""
    return torch.cat(list(taps), dim=-1)
