"""Seed-OSS: biases on queries, keys and values, and none on the output of attention unless the file says so."""

from __future__ import annotations

from collections.abc import Collection
from types import MappingProxyType

from baton.models.architecture import Architecture
from baton.models.config import Traits
from baton.models.config_fields import ConfigFields


class SeedOss(Architecture):
    name = "seed-oss"
    hf_names = ("SeedOssForCausalLM",)
    gguf_names = ("seed_oss",)
    gguf_layer_names = MappingProxyType({"post_attention_norm": "mlp_norm"})

    @classmethod
    def traits_from_hf(cls, fields: ConfigFields) -> Traits:
        return Traits(
            qkv_bias=fields.boolean("attention_bias", True),
            output_bias=fields.boolean("attention_out_bias", False),
            mlp_bias=fields.boolean("mlp_bias", False),
        )

    @classmethod
    def traits_from_gguf(cls, fields: ConfigFields, tensors: Collection[str]) -> Traits:
        return Traits(qkv_bias="blk.0.attn_q.bias" in tensors, output_bias="blk.0.attn_output.bias" in tensors)
