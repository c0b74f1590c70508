"""Shapes of well-known models by name: for random weights (--load-format dummy), to measure a model without its download."""

from __future__ import annotations

from baton.models.config import Experts, Llama3Scaling, ModelConfig, RopeConfig, Traits

LLAMA_ROPE = RopeConfig(
    theta=500_000.0, scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
)
QWEN_ROPE = RopeConfig(theta=1_000_000.0)


def _llama(layers: int, hidden: int, heads: int, head_dim: int, inner: int, **more: object) -> ModelConfig:
    fields: dict[str, object] = {
        "architecture": "llama",
        "vocab_size": 128_256,
        "kv_heads": 8,
        "rope": LLAMA_ROPE,
        "norm_eps": 1e-5,
        "tied_embeddings": False,
        "context_tokens_max": 131_072,
    }
    shape = {"layers": layers, "hidden_size": hidden, "heads": heads, "head_dim": head_dim, "intermediate_size": inner}
    return ModelConfig(**{**fields, **shape, **more})  # type: ignore[arg-type]


def _qwen3(layers: int, hidden: int, heads: int, inner: int, **more: object) -> ModelConfig:
    fields: dict[str, object] = {
        "architecture": "qwen3",
        "vocab_size": 151_936,
        "rope": QWEN_ROPE,
        "norm_eps": 1e-6,
        "traits": Traits(qk_norm=True),
        "context_tokens_max": 40_960,
    }
    return _llama(layers, hidden, heads, 128, inner, **{**fields, **more})


SHAPES: dict[str, ModelConfig] = {
    "llama-3-8b": _llama(32, 4096, 32, 128, 14_336, rope=RopeConfig(theta=500_000.0), context_tokens_max=8192),
    "llama-3.1-8b": _llama(32, 4096, 32, 128, 14_336),
    "llama-3.1-70b": _llama(80, 8192, 64, 128, 28_672),
    "llama-3.2-1b": _llama(16, 2048, 32, 64, 8192, tied_embeddings=True),
    "llama-3.2-3b": _llama(28, 3072, 24, 128, 8192, tied_embeddings=True),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied_embeddings=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied_embeddings=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12_288),
    "qwen3-30b-a3b": _qwen3(
        *(48, 2048, 32, 6144),
        architecture="qwen3_moe",
        kv_heads=4,
        experts=Experts(count=128, per_token=8, inner_size=768, normalised=True),
    ),
    "qwen3-235b-a22b": _qwen3(
        *(94, 4096, 64, 12_288),
        architecture="qwen3_moe",
        kv_heads=4,
        experts=Experts(count=128, per_token=8, inner_size=1536, normalised=True),
    ),
}
