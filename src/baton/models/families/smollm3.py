"""SmolLM3: Llama in which every fourth layer has no positions."""

from __future__ import annotations

from collections.abc import Collection
from types import MappingProxyType

from baton.errors import ModelUnsupported
from baton.models.architecture import Architecture
from baton.models.config import NO_ROPE, RopeConfig, Traits
from baton.models.config_fields import ConfigFields
from baton.models.rope_from_hf import rope_from_hf

EVERY = 4


class SmolLM3(Architecture):
    name = "smollm3"
    hf_names = ("SmolLM3ForCausalLM",)
    gguf_names = ("smollm3",)
    gguf_pairs = "neighbours"
    hf_defaults = MappingProxyType({"tie_word_embeddings": True, "rope_theta": 2_000_000.0})

    @classmethod
    def traits_from_hf(cls, fields: ConfigFields) -> Traits:
        if fields.boolean("use_sliding_window", False):
            raise ModelUnsupported(f"{fields.origin}: a sliding window is not supported for {cls.name}")
        layers, bias = fields.layer_count("num_hidden_layers"), fields.boolean("attention_bias", False)
        rotated = fields.get("no_rope_layers")  # 1 for a layer that has positions
        if not isinstance(rotated, list):
            every = max(fields.integer("no_rope_layer_interval", EVERY), 1)
            rotated = [(layer + 1) % every != 0 for layer in range(layers)]
        ropes = tuple(rope_from_hf(fields) if rotates else NO_ROPE for rotates in rotated)
        return Traits(qkv_bias=bias, output_bias=bias, mlp_bias=fields.boolean("mlp_bias", False), layer_ropes=ropes)

    @classmethod
    def traits_from_gguf(cls, fields: ConfigFields, tensors: Collection[str]) -> Traits:
        return Traits()

    @classmethod
    def layer_ropes_from_gguf(cls, fields: ConfigFields, rope: RopeConfig) -> tuple[RopeConfig, ...]:
        layers = range(fields.layer_count("block_count"))
        return tuple(rope if (layer + 1) % EVERY else NO_ROPE for layer in layers)
