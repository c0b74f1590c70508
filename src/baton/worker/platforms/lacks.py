"""Which traits of a model a way to compute does not have. torch has them all (models/decoder.py), several times slower."""

from __future__ import annotations

from baton.models.config import ModelConfig


def native_lacks(model: ModelConfig) -> list[str]:
    """Of the C kernels, in words. Empty: they compute this model."""
    traits, experts = model.traits, model.experts
    found = {
        "biases of experts": experts is not None and experts.bias,
        "attention sinks": traits.sinks,
        "clamped gates (swiglu_oai)": traits.activation == "swiglu_oai",
    }
    return [words for words, lacking in found.items() if lacking]


def cuda_lacks(model: ModelConfig) -> list[str]:
    """Of the Triton kernels, in words."""
    return []
