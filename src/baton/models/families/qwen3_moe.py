"""Qwen3 with a mixture of experts; otherwise like qwen3.py."""

from __future__ import annotations

from collections.abc import Collection

from baton.models.architecture import Architecture
from baton.models.config import Experts, Traits
from baton.models.config_fields import ConfigFields
from baton.models.families.qwen2_moe import sparse_layers
from baton.models.families.qwen3 import Qwen3


class Qwen3Moe(Architecture):
    name = "qwen3_moe"
    hf_names = ("Qwen3MoeForCausalLM",)
    gguf_names = ("qwen3moe",)

    @classmethod
    def traits_from_hf(cls, fields: ConfigFields) -> Traits:
        return Qwen3.traits_from_hf(fields)

    @classmethod
    def experts_from_hf(cls, fields: ConfigFields) -> Experts:
        # transformers 5 may name them local experts.
        count = fields.integer("num_experts", fields.get("num_local_experts"))
        return Experts(
            count=count,
            per_token=fields.integer("num_experts_per_tok"),
            inner_size=fields.integer("moe_intermediate_size"),
            normalised=fields.boolean("norm_topk_prob", False),
            layers=sparse_layers(fields),
        )

    @classmethod
    def traits_from_gguf(cls, fields: ConfigFields, tensors: Collection[str]) -> Traits:
        return Traits(qk_norm=True)

    @classmethod
    def experts_from_gguf(cls, fields: ConfigFields) -> Experts:
        return Experts(
            count=fields.integer("expert_count"),
            per_token=fields.integer("expert_used_count"),
            inner_size=fields.integer("expert_feed_forward_length"),
            normalised=True,
        )
