"""Granite 3, and dense models of Granite 4: Llama with four constant factors.

The factor r on a layer's contribution to the residual needs no arithmetic of its own. Divide the whole residual by r: then
layers add their output unscaled, the embedding is scaled by another 1 / r, and norms see no difference except in their epsilon,
which is divided by r * r."""

from __future__ import annotations

from collections.abc import Collection
from types import MappingProxyType
from typing import ClassVar

from baton.errors import ModelUnsupported
from baton.models.architecture import Architecture
from baton.models.config import NO_ROPE, RopeConfig, Traits
from baton.models.config_fields import ConfigFields
from baton.models.missing_traits import STATE_SPACE
from baton.models.rope_from_hf import rope_from_hf


class Granite(Architecture):
    name = "granite"
    hf_names: ClassVar[tuple[str, ...]] = ("GraniteForCausalLM",)
    gguf_names: ClassVar[tuple[str, ...]] = ("granite",)
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


class GraniteHybrid(Granite):
    """Granite 4: config.json has the name of a hybrid, whose layers may all be attention. Its GGUF files are then `granite`."""

    name = "granite_hybrid"
    hf_names = ("GraniteMoeHybridForCausalLM",)
    gguf_names = ()
    hf_layer_names = MappingProxyType({"shared_mlp.input_linear": "mlp.gate_up", "shared_mlp.output_linear": "mlp.down"})
    hf_defaults = MappingProxyType({"num_local_experts": 8, "rms_norm_eps": 1e-6})

    @classmethod
    def traits_from_hf(cls, fields: ConfigFields) -> Traits:
        kinds = fields.get("layer_types") or fields.get("layers_block_type")
        if not isinstance(kinds, list) or any(kind not in ("attention", "full_attention") for kind in kinds):
            raise ModelUnsupported(f"{fields.origin}: {STATE_SPACE} are not supported")
        experts = fields.integer("num_local_experts")
        if experts:
            raise ModelUnsupported(f"{fields.origin}: {experts} experts are not supported for {cls.name}")
        return super().traits_from_hf(fields)

    @classmethod
    def rope_from_hf(cls, fields: ConfigFields) -> RopeConfig:
        return rope_from_hf(fields) if fields.get("position_embedding_type") == "rope" else NO_ROPE

    @classmethod
    def mlp_size_from_hf(cls, fields: ConfigFields) -> int:
        return fields.integer("shared_intermediate_size", 1024)
