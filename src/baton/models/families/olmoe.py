"""OLMoE: experts in every layer; query and key norms over all heads as one row, as in olmo2.py."""

from __future__ import annotations

from collections.abc import Collection
from types import MappingProxyType

from baton.errors import ModelUnsupported
from baton.models.architecture import Architecture
from baton.models.config import Experts, Traits
from baton.models.config_fields import ConfigFields


class Olmoe(Architecture):
    name = "olmoe"
    hf_names = ("OlmoeForCausalLM",)
    gguf_names = ("olmoe",)
    hf_defaults = MappingProxyType({"num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5})

    @classmethod
    def traits_from_hf(cls, fields: ConfigFields) -> Traits:
        if fields.get("clip_qkv") is not None:
            raise ModelUnsupported(f"{fields.origin}: clip_qkv (limits of queries, keys and values) is not supported")
        bias = fields.boolean("attention_bias", False)
        return Traits(qkv_bias=bias, output_bias=bias, qk_norm=True, qk_norm_across_heads=True)

    @classmethod
    def experts_from_hf(cls, fields: ConfigFields) -> Experts:
        return Experts(
            count=fields.integer("num_experts", fields.get("num_local_experts")),
            per_token=fields.integer("num_experts_per_tok"),
            inner_size=fields.integer("intermediate_size"),
            normalised=fields.boolean("norm_topk_prob", False),
        )

    @classmethod
    def traits_from_gguf(cls, fields: ConfigFields, tensors: Collection[str]) -> Traits:
        return Traits(qk_norm=True, qk_norm_across_heads=True)

    @classmethod
    def experts_from_gguf(cls, fields: ConfigFields) -> Experts:
        return Experts(
            count=fields.integer("expert_count"),
            per_token=fields.integer("expert_used_count"),
            inner_size=fields.integer("feed_forward_length"),
            normalised=fields.boolean("expert_weights_norm", False),
        )
