"""Small random models of the families that people bring as targets, and what is special about each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

VOCAB = 97
PLAIN: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
HEADS = PLAIN | {"head_dim": 8}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MLA = (
    PLAIN | EXPERTS | {"num_key_value_heads": 4, "n_routed_experts": 8, "kv_lora_rank": 16, "q_lora_rank": 16}
)
MLA |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1}
MLA |= {"n_group": 2, "topk_group": 1}
MLA.pop("num_experts")
WINDOW = {"sliding_window": 6}


@dataclass(frozen=True)
class Family:
    """A family of targets.

    Attributes:
        config: the name of its configuration in transformers.
        special: what there is to follow, for docs/targets.md.
        scales: embedding_scale, logit_scale, logit_softcap.
        attention: what transformers computes it with.
        plain_rows: the first layer reads the embedding's rows (times the scale) and nothing else.
        refused: what evaluation says; empty: it decodes.
    """

    config: str
    settings: dict[str, Any] = field(default_factory=lambda: PLAIN)
    special: str = ""
    scales: tuple[float, float, float] = (1.0, 1.0, 0.0)
    attention: str = "sdpa"
    plain_rows: bool = True
    refused: str = ""


GEMMA = (32**0.5, 1.0, 0.0)
FAMILIES = {
    "Llama": Family("LlamaConfig"),
    "Llama, tied": Family("LlamaConfig", PLAIN | {"tie_word_embeddings": True}, "tied head"),
    "Llama, padded": Family(
        "LlamaConfig", PLAIN | {"vocab_size": 128}, "an embedding with more rows than the tokenizer has"
    ),
    "Qwen2": Family("Qwen2Config"),
    "Qwen2 MoE": Family(
        "Qwen2MoeConfig", PLAIN | EXPERTS | {"shared_expert_intermediate_size": 16}, "experts"
    ),
    "Qwen3": Family("Qwen3Config", HEADS),
    "Qwen3 MoE": Family("Qwen3MoeConfig", HEADS | EXPERTS, "experts"),
    "Qwen3.5": Family("Qwen3_5TextConfig", HEADS | DELTA, "gated delta net and full attention"),
    "Qwen3.5 MoE": Family(
        "Qwen3_5MoeTextConfig",
        HEADS | DELTA | EXPERTS | {"shared_expert_intermediate_size": 16},
        "gated delta net, experts",
    ),
    "Mistral": Family("MistralConfig", PLAIN | WINDOW, "sliding window in every layer"),
    "Ministral": Family("MinistralConfig", HEADS | WINDOW, "sliding window in every layer"),
    "Mixtral": Family("MixtralConfig", PLAIN | {"num_local_experts": 4}, "experts"),
    "Gemma": Family("GemmaConfig", HEADS, "scaled embedding, tied head", GEMMA),
    "Gemma 2": Family(
        "Gemma2Config",
        HEADS | WINDOW | {"query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0},
        "scaled embedding, capped scores and logits, sliding layers",
        (*GEMMA[:2], 5.0),
        "eager",
    ),
    "Gemma 3": Family(
        "Gemma3TextConfig",
        HEADS | WINDOW | {"query_pre_attn_scalar": 8},
        "scaled embedding, sliding layers, two rotary bases",
        GEMMA,
    ),
    "gpt-oss": Family(
        "GptOssConfig",
        HEADS | WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
        "attention sinks, sliding layers, experts",
        attention="eager",
    ),
    "GPT-2": Family(
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256},
        "learned positions, which the drafter does without",
        plain_rows=False,
    ),
    "GPT-NeoX": Family("GPTNeoXConfig", PLAIN, "attention and MLP side by side"),
    "OPT": Family(
        "OPTConfig",
        {"vocab_size": VOCAB, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64}
        | {"num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 256},
        "learned positions, which the drafter does without",
        plain_rows=False,
    ),
    "BLOOM": Family(
        "BloomConfig",
        {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 4, "n_head": 4},
        "ALiBi, a norm behind the embedding",
        attention="eager",
        plain_rows=False,
    ),
    "Phi": Family("PhiConfig", PLAIN, "a bias in the head, which the drafter does without (so no `kd`)"),
    "Phi-3, Phi-4": Family("Phi3Config", PLAIN | WINDOW, "sliding window in every layer"),
    "DeepSeek V2": Family("DeepseekV2Config", MLA | {"topk_method": "greedy"}, "MLA, experts"),
    "DeepSeek V3": Family("DeepseekV3Config", MLA, "MLA, experts"),
    "Command R": Family("CohereConfig", PLAIN | {"logit_scale": 0.25}, "scaled logits", (1.0, 0.25, 0.0)),
    "Command A": Family(
        "Cohere2Config",
        PLAIN | WINDOW | {"logit_scale": 0.25},
        "scaled logits, sliding layers",
        (1.0, 0.25, 0.0),
    ),
    "Granite": Family(
        "GraniteConfig",
        PLAIN | {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
        "scaled embedding and logits",
        (3.0, 0.5, 0.0),
    ),
    "OLMo 2": Family("Olmo2Config"),
    "OLMo 3": Family("Olmo3Config", PLAIN | WINDOW, "sliding layers"),
    "StarCoder2": Family("Starcoder2Config", PLAIN | WINDOW, "sliding window in every layer"),
    "GLM-4": Family("Glm4Config", HEADS),
    "GLM-4.5 MoE": Family(
        "Glm4MoeConfig",
        HEADS
        | {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"first_k_dense_replace": 1},
        "experts",
    ),
    "MiniMax-M2": Family(
        "MiniMaxM2Config",
        HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
        "experts",
    ),
    "SmolLM3": Family("SmolLM3Config", PLAIN | {"pad_token_id": 0}, "layers without positions"),
    "LFM2": Family(
        "Lfm2Config",
        PLAIN | {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3},
        "short convolutions",
    ),
    "Llama 4": Family(
        "Llama4TextConfig",
        HEADS | {"intermediate_size_mlp": 64, "num_local_experts": 2, "attention_chunk_size": 8},
        "chunked attention, experts",
    ),
    "Nemotron": Family("NemotronConfig"),
    "Falcon-H1": Family(
        "FalconH1Config",
        PLAIN | {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
        "Mamba and attention in one layer",
        refused="layer 0 keeps its memory as LinearAttentionAndFullAttentionLayer",
    ),
    "Jamba": Family(
        "JambaConfig",
        PLAIN | {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
        "Mamba 1 layers",
        refused="its family cannot go on with several tokens at once",
    ),
}
FAST = ("Llama, tied", "Gemma 2", "gpt-oss", "GPT-2")
"""Those that the tests which are not slow try."""


def build(name: str) -> Any:
    """A random model of the family, without an end of text."""
    return build_of(FAMILIES[name].config, FAMILIES[name].settings)


def build_of(config_name: str, settings: dict[str, Any]) -> Any:
    """The same of a configuration in transformers."""
    import torch
    import transformers

    settings = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None} | settings
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, config_name)(**settings)
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = None
    return model.eval()
