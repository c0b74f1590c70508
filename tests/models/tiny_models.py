"""Tiny random models with awkward shapes, as transformers builds them: the oracle of the model tests.

transformers' own initialisation is so flat that a wrong rotation hardly moves a logit; ours is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="the oracle is transformers (pip install 'baton-serve[oracle]')")
import torch  # noqa: E402

# 3 query heads share a key/value head, and head_dim is not hidden_size / num_attention_heads.
ODD: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 42,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


LLAMA3 = rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16)

EAGER = {"experts_implementation": "eager"}
MOE = {
    **EAGER,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}

MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 12}
"""transformers checks them although no layer has them."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1}),
    "llama-all-kv-heads": ("Llama", {"num_key_value_heads": 6}),
    "llama-theta": ("Llama", rope("default", rope_theta=500000.0)),
    "llama-linear": ("Llama", rope("linear", factor=3.0)),
    "llama-llama3": ("Llama", LLAMA3),
    "llama-yarn": ("Llama", YARN),
    "llama-yarn-settings": (
        "Llama",
        rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            beta_fast=8.0,
            beta_slow=2.0,
            mscale=0.7,
            mscale_all_dim=1.3,
            truncate=False,
        ),
    ),
    "llama-yarn-attention-factor": (
        "Llama",
        rope("yarn", factor=2.0, original_max_position_embeddings=32, attention_factor=1.2),
    ),
    "llama-yarn-slow": ("Llama", rope("yarn", rope_theta=4.0, factor=4.0, original_max_position_embeddings=64)),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {"hidden_size": 48, "head_dim": 8}),
    "qwen2-tied": ("Qwen2", {"hidden_size": 48, "head_dim": 8, "tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"hidden_size": 48, "head_dim": 8, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {}),
    "qwen3-tied-bias": ("Qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-moe": ("Qwen3Moe", MOE),
    "qwen3-moe-shares": ("Qwen3Moe", {**MOE, "norm_topk_prob": False, "num_experts_per_tok": 1}),
    "ernie": ("Ernie4_5", {}),
    "ernie-biases": ("Ernie4_5", {"use_bias": True}),
    "ernie-moe": (
        "Ernie4_5_Moe",
        {**EAGER, "moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 1, "head_dim": 16},
    ),
    "phi3": ("Phi3", {}),
    "phi3-window": ("Phi3", {"sliding_window": 5}),
    "phi3-partial": ("Phi3", rope("default", partial_rotary_factor=0.5)),
    "phi3-longrope": (
        "Phi3",
        {
            "hidden_size": 96,
            "max_position_embeddings": 256,
            "original_max_position_embeddings": 64,
            **rope(
                "longrope",
                partial_rotary_factor=0.75,
                short_factor=[1.0, 1.1, 1.2, 1.5, 2.0, 2.5],
                long_factor=[3.0] * 6,
                original_max_position_embeddings=64,
            ),
        },
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
            "rms_norm_eps": 1e-5,
        },
    ),
    "granite4": (
        "GraniteMoeHybrid",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 0,
            "layer_types": ["full_attention"] * 3,
            "shared_intermediate_size": 40,
            "position_embedding_type": "rope",
            "hidden_size": 48,
            "head_dim": 8,
            **MAMBA,
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, **rope("default", rope_theta=2000000.0)}),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 5,
            "rope_parameters": {
                "full_attention": YARN["rope_parameters"],
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "glm": ("Glm", {"hidden_size": 48}),
    "glm4": ("Glm4", {"hidden_size": 48}),
    "glm4-moe": (
        "Glm4Moe",
        {
            **MOE,
            "hidden_size": 48,
            "n_routed_experts": 5,
            "use_qk_norm": True,
            "routed_scaling_factor": 1.5,
            "num_mtp_layers": 0,
        },
    ),
    "cohere": ("Cohere", {"hidden_size": 48, "head_dim": 8, "logit_scale": 0.25}),
    "cohere2": (
        "Cohere2",
        {
            "hidden_size": 48,
            "head_dim": 8,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "stablelm": ("StableLm", {"hidden_size": 48, "head_dim": 8, "use_qkv_bias": True}),
    "stablelm-parallel": ("StableLm", {"hidden_size": 48, "head_dim": 8, "use_parallel_residual": True}),
    "gemma3": (
        "Gemma3",
        {
            "sliding_window": 5,
            "query_pre_attn_scalar": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma": ("Gemma", {}),
    "olmoe": (
        "Olmoe",
        {**EAGER, "hidden_size": 48, "head_dim": 8, "intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 2},
    ),
    "exaone4": (
        "Exaone4",
        {"sliding_window": 5, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    ),
    "exaone4-full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "seed-oss": ("SeedOss", {"attention_bias": True, "attention_out_bias": True}),
    "mixtral": ("Mixtral", {**EAGER, "num_local_experts": 5, "sliding_window": None}),
    "qwen2-moe": (
        "Qwen2Moe",
        {**MOE, "shared_expert_intermediate_size": 20, "norm_topk_prob": False, "mlp_only_layers": [1]},
    ),
    "gpt-oss": (
        "GptOss",
        {
            **EAGER,
            "hidden_size": 64,
            "intermediate_size": 32,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            **rope("yarn", factor=4.0, original_max_position_embeddings=16, truncate=False),
        },
    ),
    "qwen3-window": ("Qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
}

PROMPTS = ([5], [1, 2, 3, 4, 5, 6, 7], [96, 0, 50, 50, 50, 3], list(range(10, 40)))


def oracle_model(case: str, **sizes: Any) -> Any:
    """A transformers model of this case, in float32, with weights that make every part matter."""
    family, changes = CASES[case]
    config_class = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = config_class(**{**ODD, **changes, **sizes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().to(torch.float32)
    generator = torch.Generator().manual_seed(len(case))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                parameter.copy_(noise * parameter.shape[1] ** -0.5)
            else:
                parameter.copy_(0.3 * noise + (1.0 if "norm" in name else 0.0))
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):  # trained, and yet no parameter in transformers
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
        if not config.tie_word_embeddings:
            assert model.lm_head.weight is not model.model.embed_tokens.weight
    return model


@torch.no_grad()
def oracle_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0]


def oracle_greedy(model: Any, prompt: list[int], count: int, guess: Sequence[int] = ()) -> list[int]:
    """No cache, no generate(): the whole sequence again for every token. `guess`: tokens that may be right; those that are
    need one pass for all of them."""
    tokens = list(prompt)
    if guess:
        said = oracle_logits(model, [*prompt, *guess])[len(prompt) - 1 :].argmax(-1).tolist()
        tokens += [token for place, token in enumerate(guess[:count]) if said[: place + 1] == [*guess[: place + 1]]]
    while len(tokens) < len(prompt) + count:
        tokens.append(int(oracle_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]
