"""Tiny random models with awkward shapes, as transformers builds them: the oracle of the model tests.

transformers' own initialisation is so flat that a wrong rotation hardly moves a logit; ours is not.
"""

from __future__ import annotations

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
}


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


LLAMA3 = rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16)

MOE = {
    "experts_implementation": "eager",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}

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
    "qwen3-window": ("Qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
}

PROMPTS = ([5], [1, 2, 3, 4, 5, 6, 7], [96, 0, 50, 50, 50, 3], list(range(10, 40)))


def oracle_model(case: str) -> Any:
    """A transformers model of this case, in float32, with weights that make every part matter."""
    family, changes = CASES[case]
    config = getattr(transformers, f"{family}Config")(**{**ODD, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().to(torch.float32)
    generator = torch.Generator().manual_seed(len(case))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                parameter.copy_(noise * parameter.shape[1] ** -0.5)
            else:
                parameter.copy_(0.3 * noise + (1.0 if "norm" in name else 0.0))
        if not config.tie_word_embeddings:
            assert model.lm_head.weight is not model.model.embed_tokens.weight
    return model


@torch.no_grad()
def oracle_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0]


def oracle_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """No cache, no generate(): the whole sequence again for every token."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(int(oracle_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]
