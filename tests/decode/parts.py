"""Small targets and drafters for the tests of decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dflash.config import DrafterConfig, TargetConfig
from dflash.decode.drafter_state import DrafterState
from dflash.device import Device
from dflash.models.drafter import Drafter, DrafterShape
from dflash.models.target import Target, load_target, save_target

VOCAB = 97
MASK_ID = 96
CPU = Device("cpu")


def shaken(model: Any, seed: int = 3) -> Any:
    """The model with larger random weights, so that greedy text wanders instead of repeating one token."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "A_log" in name or "dt_bias" in name:  # drawn by transformers from the global generator
                parameter.copy_(torch.rand(parameter.shape, generator=generator))
            elif parameter.dim() > 1:
                scale = 0.35 if "embed" in name or "lm_head" in name else 1.2 * parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def hybrid_model(layers: int = 4, vocab: int = VOCAB) -> Any:
    """Qwen3.5: three gated-delta-net layers, then one of full attention with partial rotary embedding."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=[("linear_attention", "full_attention")[(i + 1) % 4 == 0] for i in range(layers)],
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    return shaken(Qwen3_5ForCausalLM(config))


def next_model() -> Any:
    """Qwen3-Next: the older hybrid, with experts."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    return shaken(Qwen3NextForCausalLM(config))


def full_model(layers: int = 4, vocab: int = VOCAB, **options: Any) -> Any:
    """Qwen3: full attention in every layer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        **options,
    )
    return shaken(Qwen3ForCausalLM(config))


def sliding_model() -> Any:
    """Qwen3 with a window of 6 tokens in two of its layers."""
    return full_model(
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    )


def wrapped_model() -> Any:
    """Qwen3.5 as it is released: the text model inside one for images."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    return shaken(
        Qwen3_5ForConditionalGeneration(
            Qwen3_5Config(text_config=hybrid_model().config.to_dict(), vision_config=vision)
        )
    )


MODELS = {
    "hybrid": hybrid_model,
    "next": next_model,
    "full": full_model,
    "sliding": sliding_model,
    "wrapped": wrapped_model,
}


def make_target(
    model: Any, folder: Path, layer_ids: tuple[int, ...] = (0, 1, 2), dtype: str = "float32"
) -> Target:
    """Through a folder, as a user's target comes."""
    save_target(model, folder)
    return load_target(TargetConfig(model=str(folder), layer_ids=layer_ids, dtype=dtype), CPU)


def make_drafter(
    target: Target, block_size: int = 8, sliding_layers: int = 0, window: int = 2048, seed: int = 0
) -> Drafter:
    config = DrafterConfig(
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        block_size=block_size,
        sliding_layers=sliding_layers,
        sliding_window=window,
    )
    drafter = Drafter(
        DrafterShape.resolve(config, target.info, min(MASK_ID, target.info.vocab_size - 1)), seed
    )
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5
                )
    return drafter.eval()


def prompts(lengths: tuple[int, ...], seed: int = 1, vocab: int = MASK_ID) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]


class LostTrack(LookupError):
    """The decoder is no longer in the target's text."""


class Oracle:
    """Stands for a drafter that knows the target's text and is wrong now and then, at places of its own in
    every row."""

    def __init__(self, texts: list[list[int]], prompt_lengths: list[int], wrong_every: int = 5) -> None:
        self.texts, self.prompt_lengths, self.wrong_every = texts, prompt_lengths, wrong_every
        self.calls = 0

    def draft(self, state: DrafterState, anchors: torch.Tensor, block_size: int) -> torch.Tensor:
        rows = []
        for row, (length, anchor) in enumerate(zip(state.lengths, anchors.tolist(), strict=True)):
            text, start = self._find(length, anchor)
            guesses = [*text[start + 1 : start + block_size], *([1] * block_size)][: block_size - 1]
            wrong = (7 * self.calls + 3 * row + length) % self.wrong_every
            if wrong < len(guesses):
                guesses[wrong] = (guesses[wrong] + 1) % MASK_ID
            rows.append(guesses)
        self.calls += 1
        return torch.tensor(rows)

    def _find(self, length: int, anchor: int) -> tuple[list[int], int]:
        for text, prompt in zip(self.texts, self.prompt_lengths, strict=True):
            start = length - prompt
            if 0 <= start < len(text) and text[start] == anchor:
                return text, start
        raise LostTrack(f"the decoder stands at {length} with token {anchor}, where no text is")
