"""Granite 3: Llama with four constant factors.

The factor r on a layer's contribution to the residual needs no arithmetic of its own. Divide the whole residual by r: then
layers add their output unscaled, the embedding is scaled by another 1 / r, and norms see no difference except in their epsilon,
which is divided by r * r."""

from __future__ import annotations

from collections.abc import Collection

from baton.models.architecture import Architecture
from baton.models.config import Traits
from baton.models.config_fields import ConfigFields


class Granite(Architecture):
    name = "granite"
    hf_names = ("GraniteForCausalLM",)
    gguf_names = ("granite",)
    gguf_pairs = "neighbours"

    @classmethod
    def traits_from_hf(cls, fields: ConfigFields) -> Traits:
        bias = fields.boolean("attention_bias", False)
        return Traits(
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=fields.boolean("mlp_bias", False),
            embedding_scale=fields.positive("embedding_multiplier", 1.0) / fields.positive("residual_multiplier", 1.0),
            attention_scale=fields.positive("attention_multiplier", 1.0),
            logits_scale=1.0 / fields.positive("logits_scaling", 1.0),
        )

    @classmethod
    def norm_eps_from_hf(cls, fields: ConfigFields) -> float:
        return fields.number("rms_norm_eps") / fields.positive("residual_multiplier", 1.0) ** 2

    @classmethod
    def traits_from_gguf(cls, fields: ConfigFields, tensors: Collection[str]) -> Traits:
        return Traits(
            embedding_scale=fields.positive("embedding_scale", 1.0) / fields.positive("residual_scale", 1.0),
            attention_scale=fields.positive("attention.scale"),
            logits_scale=1.0 / fields.positive("logit_scale", 1.0),
        )

    @classmethod
    def norm_eps_from_gguf(cls, fields: ConfigFields) -> float:
        return fields.number("attention.layer_norm_rms_epsilon") / fields.positive("residual_scale", 1.0) ** 2
