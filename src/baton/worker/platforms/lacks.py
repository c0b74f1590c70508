"""Which traits of a model a way to compute does not have. torch has them all (models/decoder.py), several times slower."""

from __future__ import annotations

from baton.models.config import ModelConfig


def native_lacks(model: ModelConfig) -> list[str]:
    """Of the C kernels, in words. Empty: they compute this model."""
    return ["mixtures of experts"] if model.experts is not None else []


def cuda_lacks(model: ModelConfig) -> list[str]:
    """Of the Triton kernels, in words."""
    traits, experts = model.traits, model.experts
    found = {
        "experts beside dense layers, shared experts or a corrected router": experts is not None and not experts.plain,
        "an activation other than SiLU": traits.activation != "silu",
        "norms behind attention and MLP": traits.norms != "before",
        "LayerNorm": traits.layer_norm,
        "attention and MLP side by side": traits.parallel,
        "a norm across heads": traits.qk_norm_across_heads,
        "scaled embeddings": traits.embedding_scale != 1.0,
        "rotary settings by layer": bool(traits.layer_ropes),
    }
    return [words for words, lacking in found.items() if lacking]
