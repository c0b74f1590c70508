"""Settings as the hub has them, written by transformers 4 or by a family's authors, of tiny models."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}
OLMO3_YARN = {
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "rope_type": "yarn",
}
GPT_OSS_YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 32.0,
    "original_max_position_embeddings": 8,
    "rope_type": "yarn",
    "truncate": False,
}
QWEN_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
ERNIE_MOE = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2}
LONG = {"type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [3.0] * 3}
GLM_MOE = {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 24}

PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 2": ("Llama", {"rope_scaling": None, "rms_norm_eps": 1e-5}),
    "Llama 3.1": ("Llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "head_dim": None}),
    "Llama, linear": ("Llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "Mistral 7B": ("Mistral", {"rope_theta": 10000.0, "sliding_window": 4096}),
    "Mistral 7B v0.3": ("Mistral", {"rope_theta": 1000000.0, "sliding_window": None}),
    "Qwen2.5": ("Qwen2", {"rope_theta": 1000000.0, "use_sliding_window": False, "sliding_window": 64, "max_window_layers": 4}),
    "Qwen2.5, yarn": ("Qwen2", {"rope_theta": 1000000.0, "rope_scaling": YARN, "use_sliding_window": False}),
    "Qwen2, windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 4}),
    "Qwen3": ("Qwen3", {"head_dim": 16, "rope_theta": 1000000, "rope_scaling": None, "attention_bias": False}),
    "Qwen3-MoE": ("Qwen3Moe", {**QWEN_MOE, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [], "rope_theta": 1e6}),
    "Qwen1.5-MoE": (
        "Qwen2Moe",
        {**QWEN_MOE, "shared_expert_intermediate_size": 32, "norm_topk_prob": False, "rope_theta": 1e6},
    ),
    "Qwen2-MoE, every other": (
        "Qwen2Moe",
        {**QWEN_MOE, "decoder_sparse_step": 2, "mlp_only_layers": [3], "shared_expert_intermediate_size": 32},
    ),
    "Mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "rope_theta": 1e6, "sliding_window": None}),
    "Mixtral, shortest": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "ERNIE 4.5": ("Ernie4_5", {"rope_theta": 500000.0, "rope_scaling": None, "use_bias": False, "head_dim": 16}),
    "ERNIE 4.5, shortest": ("Ernie4_5", {"head_dim": 16}),
    "ERNIE 4.5 MoE": ("Ernie4_5_Moe", {**ERNIE_MOE, "moe_layer_start_index": 1, "moe_layer_end_index": 6, "rope_theta": 5e5}),
    "ERNIE 4.5 MoE, shortest": ("Ernie4_5_Moe", ERNIE_MOE),
    "Phi-3-mini": ("Phi3", {"rope_theta": 10000.0, "rope_scaling": None, "sliding_window": 63}),
    "Phi-4-mini": (
        "Phi3",
        {
            "partial_rotary_factor": 0.75,
            "rope_theta": 10000.0,
            "rope_scaling": LONG,
            "original_max_position_embeddings": 64,
            "sliding_window": 262144,
            "tie_word_embeddings": True,
        },
    ),
    "Granite 3.3": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0078125,
            "logits_scaling": 16.0,
            "rope_theta": 10000000.0,
            "rope_scaling": None,
        },
    ),
    "Granite 4.0 micro": (
        "GraniteMoeHybrid",
        {
            "embedding_multiplier": 12,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.015625,
            "logits_scaling": 10,
            "rope_theta": 10000000,
            "rope_scaling": None,
            "position_embedding_type": "rope",
            "layer_types": ["attention"] * 8,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 64,
            "mamba_n_heads": 16,
            "mamba_d_head": 8,
            "tie_word_embeddings": True,
        },
    ),
    "SmolLM3": (
        "SmolLM3",
        {
            "no_rope_layers": [1, 1, 1, 0, 1, 1, 1, 0],
            "no_rope_layer_interval": 4,
            "rope_theta": 5000000.0,
            "layer_types": ["full_attention"] * 8,
            "use_sliding_window": False,
        },
    ),
    "SmolLM3, shortest": ("SmolLM3", {}),
    "OLMo 2": ("Olmo2", {"rope_theta": 500000, "rope_scaling": None}),
    "OLMo 2, linear": ("Olmo2", {"rope_theta": 500000, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    "OLMo 3": (
        "Olmo3",
        {
            "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
            "rope_theta": 500000,
            "rope_scaling": OLMO3_YARN,
            "sliding_window": 64,
        },
    ),
    "OLMo 3, no kinds": ("Olmo3", {"rope_theta": 500000, "rope_scaling": OLMO3_YARN, "sliding_window": 64}),
    "OLMo 3, shortest": ("Olmo3", {}),
    "GLM-4-9B": ("Glm", {"partial_rotary_factor": 0.5, "head_dim": 16, "rope_theta": 10000.0, "attention_bias": True}),
    "GLM-4-0414": ("Glm4", {"partial_rotary_factor": 0.5, "head_dim": 16, "rope_theta": 10000.0, "attention_bias": False}),
    "GLM-4.5": (
        "Glm4Moe",
        {
            **GLM_MOE,
            "partial_rotary_factor": 0.5,
            "head_dim": 16,
            "rope_theta": 1000000,
            "rope_scaling": None,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
        },
    ),
    "Command R": ("Cohere", {"logit_scale": 0.0625, "rope_theta": 8000000.0, "layer_norm_eps": 1e-5, "use_qk_norm": False}),
    "Command R7B": (
        "Cohere2",
        {
            "head_dim": 16,
            "logit_scale": 0.25,
            "rope_theta": 50000,
            "rope_scaling": None,
            "sliding_window": 64,
            "sliding_window_pattern": 4,
            "order_of_interleaved_layers": "local_attn_first",
        },
    ),
    "Command R7B, shortest": ("Cohere2", {}),
    "StableLM 2": (
        "StableLm",
        {"partial_rotary_factor": 0.25, "rope_theta": 10000, "use_qkv_bias": True, "use_parallel_residual": False},
    ),
    "Gemma 2B": ("Gemma", {"head_dim": 16, "hidden_act": "gelu", "rope_theta": 10000.0, "rope_scaling": None}),
    "Gemma 7B": ("Gemma", {"head_dim": 16, "hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}),
    "OLMoE": (
        "Olmoe",
        {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": False, "clip_qkv": None, "rope_theta": 10000.0},
    ),
    "OLMoE, shortest": ("Olmoe", {}),
    "EXAONE 4 32B": (
        "Exaone4",
        {
            "head_dim": 16,
            "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
            "rope_theta": 1000000,
            "rope_scaling": LLAMA3,
            "sliding_window": 64,
            "sliding_window_pattern": "LLLG",
        },
    ),
    "EXAONE 4 1.2B": (
        "Exaone4",
        {
            "head_dim": 16,
            "layer_types": ["full_attention"] * 8,
            "rope_theta": 1000000,
            "rope_scaling": LLAMA3,
            "sliding_window": None,
            "sliding_window_pattern": None,
            "tie_word_embeddings": True,
        },
    ),
    "EXAONE 4, shortest": ("Exaone4", {}),
    "Seed-OSS": (
        "SeedOss",
        {"head_dim": 16, "attention_bias": True, "attention_out_bias": False, "mlp_bias": False, "rope_theta": 10000000.0},
    ),
    "Gemma 3 1B": (
        "Gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "rope_local_base_freq": 10000,
            "rope_theta": 1000000,
            "rope_scaling": None,
            "sliding_window": 64,
            "sliding_window_pattern": 6,
        },
    ),
    "Gemma 3 4B": (
        "Gemma3",
        {
            "head_dim": 16,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 64,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "experts_per_token": 2,
            "rope_theta": 150000,
            "rope_scaling": GPT_OSS_YARN,
            "sliding_window": 64,
            "attention_bias": True,
            "swiglu_limit": 7.0,
        },
    ),
}


def published(model: str) -> dict[str, Any]:
    """config.json of one of them."""
    family, settings = PUBLISHED[model]
    return {**SIZES, "rms_norm_eps": 1e-6, **settings, "architectures": [f"{family}ForCausalLM"]}
