"""The target's memory of several rows of tokens: it can look ahead, and then keep only what was accepted.

A full-attention layer remembers keys and values, which are simply cut. A recurrent layer (gated delta net,
Qwen3.5's linear attention) remembers one state that already holds the rejected tokens, and transformers'
`cache.crop()` does not bring it back: it cuts the convolution's window and leaves the recurrent state as it
is (so `is_croppable` is false for such a cache). Here the state from before the pass is put back, and only
the layer's mixer runs again, over the accepted tokens: its inputs are right as they were, since nothing right
of a token reaches it."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dflash.decode.rows import kept_columns, padding_mask, take_columns
from dflash.models.target import Target, stack_taps
from steptime.errors import UserError

_CHECKED = (12, 6)
"""Tokens of the first and of the second pass of `check_continues`."""
_AGREES = 0.2
"""Most that two passes may differ, as a share of the logits' norm: bfloat16 differs by hundredths, a state
that was lost by about one."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a pass of the target gives.

    Attributes:
        logits: `[rows, n, V]`.
        features: `[rows, n, K*H]`, the taps side by side.
    """

    logits: torch.Tensor
    features: torch.Tensor


@dataclass(frozen=True, slots=True)
class _RecurrentBefore:
    """A recurrent layer as it was before a pass, and what the pass fed to its mixer."""

    layer: Any
    mixer: nn.Module
    convolutions: dict[int, torch.Tensor]
    states: dict[int, torch.Tensor | None]


class TargetState:
    """Keys, values and recurrent states of the rows' committed tokens.

    A pass (`look`) is followed by `commit`, which says how many of its tokens count. Rows may differ in
    length; they lie right-aligned (`dflash.decode.rows`). One thread uses it, under `torch.no_grad()`.

    Attributes:
        lengths: committed tokens of each row.
    """

    def __init__(self, target: Target, prompts: Sequence[Sequence[int]]) -> None:
        if not prompts or not all(prompts):
            raise UserError("a prompt has no tokens")
        self.target = target
        self.lengths = [0] * len(prompts)
        self._prompts = prompts
        self._cache = _new_cache(target)
        self._columns = 0
        self._pending = 0
        self._before: dict[int, _RecurrentBefore] = {}
        self._inputs: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._mixers: dict[int, nn.Module] = {}
        parameters = inspect.signature(target.model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._can_cut_logits = "logits_to_keep" in parameters

    def prefill(self) -> Seen:
        """Run the prompts and commit them. Logits `[rows, 1, V]` of the last token, features of all,
        right-aligned."""
        device = self.target.device.torch
        lengths = [len(prompt) for prompt in self._prompts]
        columns = max(lengths)
        ids = torch.zeros(len(lengths), columns, dtype=torch.int64)
        for row, prompt in enumerate(self._prompts):
            ids[row, columns - len(prompt) :] = torch.tensor(prompt, dtype=torch.int64)
        mask = padding_mask(lengths, columns, device)
        first = torch.tensor([length - columns for length in lengths], device=device)
        positions = (torch.arange(columns, device=device) + first[:, None]).clamp_(min=0)
        seen = self._forward(ids.to(device), positions, mask, logits_to_keep=1)
        self.lengths, self._columns = lengths, columns
        self._mixers = _find_mixers(self.target, self._cache)
        return seen

    def look(self, tokens: torch.Tensor) -> Seen:
        """Run `tokens` (int64 `[rows, n]`) after the committed ones; nothing is committed yet."""
        n = tokens.shape[1]
        device = tokens.device
        starts = torch.tensor(self.lengths, device=device)
        positions = starts[:, None] + torch.arange(n, device=device)
        mask = padding_mask([length + n for length in self.lengths], self._columns + n, device)
        self._pending = n
        if n == 1:  # a lone token is always kept
            return self._forward(tokens, positions, mask)
        self._before = {
            index: _remember(self._cache.layers[index], mixer) for index, mixer in self._mixers.items()
        }
        with self._noting_inputs():
            return self._forward(tokens, positions, mask)

    def commit(self, kept: Sequence[int]) -> None:
        """Keep the first `kept[r]` (1..n) tokens of the last pass in row r, as if the others had never been
        seen."""
        device = self.target.device.torch
        lengths = [length + count for length, count in zip(self.lengths, kept, strict=True)]
        columns = max(lengths)
        moved = kept_columns(self._columns, kept, columns, device)
        for layer in self._cache.layers:
            if getattr(layer, "keys", None) is not None:
                layer.keys = take_columns(layer.keys, moved, columns, 2)
                layer.values = take_columns(layer.values, moved, columns, 2)
        self._roll_back_recurrent(kept)
        self.lengths, self._columns = lengths, columns

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        index = torch.tensor(rows, device=self.target.device.torch)
        for layer in self._cache.layers:
            if getattr(layer, "keys", None) is not None:
                layer.keys, layer.values = layer.keys[index], layer.values[index]
            for name in ("conv_states", "recurrent_states"):
                states: dict[int, torch.Tensor | None] = getattr(layer, name, {})
                for key, state in states.items():
                    states[key] = None if state is None else state[index]
        self.lengths = [self.lengths[row] for row in rows]
        longest = max(self.lengths)
        for layer in self._cache.layers:
            if getattr(layer, "keys", None) is not None:
                layer.keys, layer.values = layer.keys[:, :, -longest:], layer.values[:, :, -longest:]
        self._columns = longest

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None, **options: Any
    ) -> Seen:
        if not self._can_cut_logits:
            options.clear()
        with self.target.recording() as taken:
            output = self.target.model(
                input_ids=ids,
                position_ids=positions,
                attention_mask=None if mask is None else mask.long(),
                use_cache=True,
                **{self._cache_name: self._cache},
                **options,
            )
        return Seen(output.logits, stack_taps(taken))

    @contextlib.contextmanager
    def _noting_inputs(self) -> Iterator[None]:
        """Keep what the recurrent mixers are called with."""
        self._inputs.clear()
        handles = []
        for index, mixer in self._mixers.items():

            def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], index: int = index) -> None:
                self._inputs[index] = (args, kwargs)

            handles.append(mixer.register_forward_pre_hook(note, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _roll_back_recurrent(self, kept: Sequence[int]) -> None:
        """Bring the recurrent states of rows with rejected tokens to the end of their accepted ones."""
        for count in sorted(set(kept) - {self._pending}):
            rows = torch.tensor(
                [row for row, own in enumerate(kept) if own == count], device=self.target.device.torch
            )
            for index, before in self._before.items():
                self._replay(index, before, rows, count)
        self._before = {}
        self._inputs.clear()

    def _replay(self, index: int, before: _RecurrentBefore, rows: torch.Tensor, count: int) -> None:
        layer = copy.copy(before.layer)
        layer.conv_states = {key: state[rows] for key, state in before.convolutions.items()}
        layer.recurrent_states = {
            key: None if state is None else state[rows] for key, state in before.states.items()
        }
        cache = copy.copy(self._cache)
        cache.layers = [*self._cache.layers]
        cache.layers[index] = layer
        args, kwargs = self._inputs[index]
        hidden = args[0] if args else kwargs["hidden_states"]
        # The window's padding lies left of the pass, so the replayed part has none.
        changed = {"attention_mask": None} if "attention_mask" in kwargs else {}
        changed |= {key: cache for key, value in kwargs.items() if value is self._cache}
        hidden = hidden[rows, :count]
        before.mixer(
            *((hidden, *args[1:]) if args else ()),
            **{**kwargs, **changed, **({} if args else {"hidden_states": hidden})},
        )
        for own, replayed in (
            (before.layer.conv_states, layer.conv_states),
            (before.layer.recurrent_states, layer.recurrent_states),
        ):
            for key, state in replayed.items():
                if state is not None:
                    own[key][rows] = state


@torch.no_grad()
def check_continues(target: Target) -> None:
    """Refuse a target whose family cannot go on with several tokens at once.

    Verification reads a whole block after the committed tokens. Some recurrent layers (Jamba's) take up their
    state only for a single token, and begin anew without a word otherwise. So a short text is read in one
    pass and in two, once for a target; the logits must agree as well as two passes can.

    Raises:
        UserError: they do not.
    """
    if target.continues is None:
        text = [1 + 7 * place % (target.info.vocab_size - 1) for place in range(sum(_CHECKED))]
        first = _CHECKED[0]
        whole = TargetState(target, [text]).prefill().logits[0, -1].float()
        state = TargetState(target, [text[:first]])
        state.prefill()
        later = torch.tensor([text[first:]], device=target.device.torch)
        parts = state.look(later).logits[0, -1].float()
        target.continues = bool((whole - parts).norm() <= _AGREES * whole.norm())
    if not target.continues:
        raise UserError(
            f"target {target.info.model!r} ({target.info.family}): its family cannot go on with several "
            "tokens at once, so drafts cannot be verified; it can be trained for, but not decoded here"
        )


def _new_cache(target: Target) -> Any:
    """An empty cache whose attention layers all keep everything: a sliding window's own would forget what a
    cut needs."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionLayer

    cache = DynamicCache(config=target.text_model.config)
    if not cache.layers:
        cache.layers = [DynamicLayer() for _ in range(target.info.layers)]
    for index, layer in enumerate(cache.layers):
        if (
            getattr(layer, "is_sliding", False)
            and isinstance(layer, DynamicLayer)
            and not hasattr(layer, "conv_states")
        ):
            cache.layers[index] = DynamicLayer()
        elif type(layer) not in (DynamicLayer, LinearAttentionLayer):
            raise UserError(
                f"target {target.info.model!r} ({target.info.family}): layer {index} keeps its memory as "
                f"{type(layer).__name__}, which this decoder cannot roll back"
            )
    return cache


def _find_mixers(target: Target, cache: Any) -> dict[int, nn.Module]:
    """The module inside each recurrent layer that moves its state.

    Raises:
        UserError: a layer in which it cannot be told.
    """
    mixers = {}
    for index, layer in enumerate(cache.layers):
        if not any(state is not None for state in getattr(layer, "conv_states", {}).values()):
            continue
        block = target.layers[index]
        found = [child for child in block.children() if getattr(child, "layer_idx", None) == index]
        if len(found) != 1:
            raise UserError(
                f"target {target.info.model!r} ({target.info.family}): cannot tell which part of layer "
                f"{index} is recurrent, so rejected tokens could not be rolled back"
            )
        mixers[index] = found[0]
    return mixers


def _remember(layer: Any, mixer: nn.Module) -> _RecurrentBefore:
    convolutions = {key: state.clone() for key, state in layer.conv_states.items()}
    states = {key: None if state is None else state.clone() for key, state in layer.recurrent_states.items()}
    return _RecurrentBefore(layer, mixer, convolutions, states)
