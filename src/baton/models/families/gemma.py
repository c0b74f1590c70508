"""Gemma 1 and CodeGemma: Llama with GELU, scaled embeddings, and norms that multiply with 1 + weight."""

from __future__ import annotations

from collections.abc import Collection
from types import MappingProxyType

from baton.errors import ModelUnsupported
from baton.models.architecture import Architecture
from baton.models.config import Traits
from baton.models.config_fields import ConfigFields


class Gemma(Architecture):
    name = "gemma"
    hf_names = ("GemmaForCausalLM",)
    gguf_names = ("gemma",)
    activation = "gelu_tanh"
    hf_activations = MappingProxyType({"gelu": "gelu_tanh"})  # the first files say gelu, and mean its approximation
    norm_plus_one = True
    hf_defaults = MappingProxyType({"tie_word_embeddings": True, "head_dim": 256, "max_position_embeddings": 8192})

    @classmethod
    def traits_from_hf(cls, fields: ConfigFields) -> Traits:
        if fields.get("use_bidirectional_attention"):
            raise ModelUnsupported(f"{fields.origin}: use_bidirectional_attention is not supported")
        bias = fields.boolean("attention_bias", False)
        return _traits(fields.integer("hidden_size"), bias=bias)

    @classmethod
    def traits_from_gguf(cls, fields: ConfigFields, tensors: Collection[str]) -> Traits:
        return _traits(fields.integer("embedding_length"))


def _traits(hidden: int, *, bias: bool = False) -> Traits:
    return Traits(qkv_bias=bias, output_bias=bias, activation="gelu_tanh", embedding_scale=max(hidden, 1) ** 0.5)
