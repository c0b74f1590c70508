"""Qwen1.5-MoE and Qwen2-57B-A14B: biases on queries, keys and values, and experts beside a shared one with a gate."""

from __future__ import annotations

from collections.abc import Collection
from types import MappingProxyType

from baton.models.architecture import Architecture
from baton.models.config import Experts, Traits
from baton.models.config_fields import ConfigFields
from baton.models.families.qwen2 import qwen_windows


class Qwen2Moe(Architecture):
    name = "qwen2_moe"
    hf_names = ("Qwen2MoeForCausalLM",)
    gguf_names = ("qwen2moe",)
    hf_layer_names = MappingProxyType(
        {
            "mlp.shared_expert.gate_proj": "mlp.shared.gate",
            "mlp.shared_expert.up_proj": "mlp.shared.up",
            "mlp.shared_expert.down_proj": "mlp.shared.down",
            "mlp.shared_expert_gate": "mlp.shared_gate",
        }
    )

    @classmethod
    def traits_from_hf(cls, fields: ConfigFields) -> Traits:
        return Traits(qkv_bias=fields.boolean("qkv_bias", True), layer_windows=qwen_windows(fields))

    @classmethod
    def experts_from_hf(cls, fields: ConfigFields) -> Experts:
        return Experts(
            count=fields.integer("num_experts"),
            per_token=fields.integer("num_experts_per_tok"),
            inner_size=fields.integer("moe_intermediate_size"),
            normalised=fields.boolean("norm_topk_prob", False),
            layers=sparse_layers(fields),
            shared_size=fields.integer("shared_expert_intermediate_size"),
            shared_gate=True,
        )

    @classmethod
    def traits_from_gguf(cls, fields: ConfigFields, tensors: Collection[str]) -> Traits:
        return Traits(qkv_bias=True)

    @classmethod
    def experts_from_gguf(cls, fields: ConfigFields) -> Experts:
        return Experts(
            count=fields.integer("expert_count"),
            per_token=fields.integer("expert_used_count"),
            inner_size=fields.integer("expert_feed_forward_length"),
            normalised=False,
            shared_size=fields.integer("expert_shared_feed_forward_length"),
            shared_gate=True,
        )


def sparse_layers(fields: ConfigFields) -> tuple[bool, ...]:
    """Layers that have experts. Empty: all."""
    dense, every = fields.integers("mlp_only_layers"), fields.integer("decoder_sparse_step", 1)
    layers = fields.layer_count("num_hidden_layers")
    sparse = tuple(layer not in dense and (layer + 1) % max(every, 1) == 0 for layer in range(layers))
    return () if all(sparse) else sparse
