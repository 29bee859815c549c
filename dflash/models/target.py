"""The frozen target: loaded through transformers, tapped by hooks, stopped after the last tapped layer.

A tap `j` is the output of decoder layer `j` (transformers calls it `hidden_states[j + 1]`; engines that
number the inputs of layers call it `j + 1`). Reference 1.3, 1.4 and 7."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dflash.config import TargetConfig
from dflash.data.documents import DocumentRows
from dflash.device import Device, torch_dtype
from dflash.models.dtypes import say_once, settle_target
from dflash.models.quantized import (
    Quantization,
    check_runs,
    full_dtype,
    full_embedding,
    full_head,
    is_full,
    load_options,
    shared_tensors,
)
from dflash.models.target_info import (
    LOADING,
    TINY,
    TargetInfo,
    build_target_layer_ids,
    count_parameters,
    count_weight_bytes,
    first_line,
    inspect_target,
    resolve_mask_token,
    tiny_config,
)
from steptime.errors import UserError

__all__ = [
    "TINY",
    "DocumentRows",
    "Target",
    "TargetInfo",
    "build_target_layer_ids",
    "build_tiny",
    "count_parameters",
    "count_weight_bytes",
    "inspect_target",
    "load_target",
    "resolve_mask_token",
    "save_target",
    "stack_taps",
]

# Layer kinds whose masks the taps can do without: causal, no matter what is right of the sample.
_MASK_FREE_LAYERS = {"full_attention", "sliding_attention", "linear_attention"}
_MASK_FREE = "dflash_causal"


_AGREES = 0.01
"""Most that a target and its twin may differ, as a share of the logits' norm."""


class _LastTapTaken(Exception):
    """Ends the forward pass: nothing after the last tapped module is needed."""


class Target:
    """A frozen causal language model with taps. One thread uses it at a time.

    Attributes:
        model: transformers' causal language model, for generation; `text_model` its decoder.
        layers, norm: the decoder's layers and the norm after the last one.
        embedding, head: `[V, H]`, frozen: the rows that the first layer reads, and the map to the logits
            before they are capped. The model's own weights (one tensor where it ties them), or copies times
            its scale where it has one, and in full where it has them quantised.
        continues: several tokens can be read after others in one pass; None: not tried yet
            (`decode.target_state.check_continues`).
        head_has_bias: the logits have a bias besides, which the drafter does without.
    """

    def __init__(self, model: Any, info: TargetInfo, device: Device) -> None:
        self.model = model.requires_grad_(False).eval()
        self.text_model, self.layers, self.norm = find_decoder(model)
        self.info = info
        self.device = device
        self.layer_ids = info.layer_ids
        reads, head = model.get_input_embeddings(), model.get_output_embeddings()
        dtype, place = full_dtype(model), device.torch
        # A module that scales by itself has done so where its rows had to be computed.
        scale = info.embedding_scale if is_full(reads) or not hasattr(reads, "embed_scale") else 1.0
        self.embedding = _scaled(full_embedding(reads, info.vocab_size, dtype, place), scale)
        self.head = _scaled(full_head(head, info.hidden_size, dtype, place), info.logit_scale)
        self.head_has_bias = getattr(head, "bias", None) is not None
        self.continues: bool | None = None
        self._taken: list[torch.Tensor] | None = None
        self._stop_after: nn.Module | None = None
        kinds = set(getattr(self.text_model.config, "layer_types", None) or ["full_attention"])
        self._mask_free = kinds <= _MASK_FREE_LAYERS
        self._tap()

    def taps(
        self, input_ids: torch.Tensor, documents: DocumentRows | None = None
    ) -> tuple[torch.Tensor, ...]:
        """The tapped hidden states of right-padded rows.

        No attention mask is passed: what is right of a token never reaches it, and building a mask reads
        device values. The rows end in states of padding that nobody may use.

        Args:
            input_ids: int64 `[batch, length]` on the target's device.
            documents: for packed rows; every document then runs as if alone, in attention and in recurrent
                state alike.

        Returns:
            One `[batch, length, H]` tensor for each of `layer_ids`, in the target's dtype, without a graph.
        """
        return tuple(self._run(input_ids, documents, self._last_layer))

    def taps_and_last(
        self, input_ids: torch.Tensor, documents: DocumentRows | None = None
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """`taps`, and the normed last hidden state `[batch, length, H]`: `last @ head.T` are the target's
        logits before they are capped."""
        *taps, last = self._run(input_ids, documents, self.norm)
        return tuple(taps), last

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[torch.Tensor]]:
        """Collect the taps of passes made through `self.model` inside, in call order, without stopping
        them."""
        taken: list[torch.Tensor] = []
        self._taken = taken
        try:
            yield taken
        finally:
            self._taken = None

    def twin(self, device: Device) -> Target:
        """Another target over the same weights, for another thread: modules, taps, config and stream of its
        own, no weight of its own. Call it while nobody runs this one.

        Raises:
            UserError: the two do not compute the same.
        """
        ids = torch.ones(1, 4, dtype=torch.int64, device=self.device.torch)
        with torch.no_grad():
            before = self.model(input_ids=ids, use_cache=False).logits
        for hook in self._hooks:
            hook.remove()
        twin = copy.copy(self)
        twin.model, twin.device = copy.deepcopy(self.model, shared_tensors(self.model)), device
        twin.text_model, twin.layers, twin.norm = find_decoder(twin.model)
        for one in (self, twin):
            one._tap()
        with torch.no_grad():
            own = twin.model(input_ids=ids, use_cache=False).logits
        if not (before - own).norm() <= _AGREES * before.norm():
            raise UserError(f"target {self.info.model!r}: its layers cannot be shared by two threads")
        return twin

    def _tap(self) -> None:
        self._hooks = [self.layers[index].register_forward_hook(self._take) for index in self.layer_ids]
        self._hooks.append(self.norm.register_forward_hook(self._take_last))
        self._last_layer: nn.Module = self.layers[self.layer_ids[-1]]

    def _run(
        self, input_ids: torch.Tensor, documents: DocumentRows | None, stop_after: nn.Module
    ) -> list[torch.Tensor]:
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
        """Let attention be causal by itself; transformers else looks at the position ids' values on the
        host."""
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
    config = settle_target(config, device.name)
    dtype = torch_dtype(config.dtype)
    _quieten()
    with LOADING:
        if config.model == TINY:
            model = build_tiny(config, dtype)
        else:
            model = _from_pretrained(config.model, dtype, info.quantization, device.torch)
    model = model.to(device.torch)
    if info.quantization is not None:
        check_runs(model, config.model, info.quantization, config.dtype)
    return Target(model, info, device)


def build_tiny(config: TargetConfig, dtype: torch.dtype = torch.float32) -> Any:
    """The built-in target with weights from `tiny.seed`: a transformers model, the same whatever was drawn
    before."""
    from transformers import Qwen3_5ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.tiny.seed)
        model: Any = Qwen3_5ForCausalLM(tiny_config(config))
    return model.to(dtype)


def save_target(model: Any, path: str | Path) -> None:
    """Write a (trained) target as a Hugging Face folder; `target.model = path` loads it again."""
    _quieten()
    model.save_pretrained(str(path))


def _from_pretrained(
    model: str, dtype: torch.dtype, quantization: Quantization | None, device: torch.device
) -> Any:
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        # No attention is asked for: transformers takes SDPA where the family has it, and where SDPA would
        # leave something out (gpt-oss's sinks, Gemma 2's capped scores) what computes all of it.
        options = {"dtype": dtype, "local_files_only": True, "trust_remote_code": False}
        options |= load_options(quantization, device)
        with warnings.catch_warnings():  # that load_options have their say, which is meant
            warnings.filterwarnings("ignore", message="You passed `quantization_config`")
            loaded, report = load(model, output_loading_info=True, **options)
    except Exception as error:
        raise UserError(f"target.model = {model!r}: cannot load its weights: {first_line(error)}") from None
    lost = sorted(
        [*report.get("missing_keys", ()), *(str(item[0]) for item in report.get("mismatched_keys", ()))]
    )
    if lost:
        raise UserError(
            f"target.model = {model!r}: {len(lost)} tensors are missing or misshapen, first {lost[0]!r}"
        )
    kind = loaded.config._attn_implementation
    if kind != "sdpa":
        say_once(f"target {model!r} ({loaded.config.model_type}) has no SDPA: its attention is {kind!r}")
    return loaded


_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f", "embedding_norm")


def find_decoder(model: Any) -> tuple[Any, nn.ModuleList, nn.Module]:
    """The text decoder inside any wrapper (the module that owns the embedding and the layers), its layers,
    and its final norm.

    Raises:
        UserError: there is no such module.
    """
    count = int(model.config.get_text_config().num_hidden_layers)
    embedding = model.get_input_embeddings()
    for _, module in model.named_modules():
        children = dict(module.named_children())
        stacks = [
            child for child in children.values() if isinstance(child, nn.ModuleList) and len(child) == count
        ]
        norms = [children[name] for name in _NORMS if name in children]
        if len(stacks) == 1 and norms and any(child is embedding for child in children.values()):
            return module, stacks[0], norms[0]
    raise UserError(
        f"target {type(model).__name__}: found no decoder that owns the embedding, {count} layers and a "
        "final norm, so there is nothing to tap"
    )


def _scaled(weight: torch.Tensor, scale: float) -> torch.Tensor:
    """The weight itself, or a copy times the scale, rounded as the target rounds it."""
    if scale == 1.0:
        return weight
    return (weight.detach() * torch.tensor(scale).to(weight)).requires_grad_(False)


def _mask_free_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    **kwargs: Any,
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
    """Keep transformers' word on missing kernels, which `dflash doctor` says, and its progress bars out of
    the run."""
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
