"""ERNIE 4.5, dense and with experts: neighbouring dimensions of a head rotate together. With experts the first layers may be
dense, every token also passes shared experts, and a bias per expert corrects the choice."""

from __future__ import annotations

from collections.abc import Collection
from types import MappingProxyType

from baton.errors import ModelUnsupported
from baton.models.architecture import Architecture
from baton.models.config import Experts, Traits
from baton.models.config_fields import ConfigFields


class Ernie(Architecture):
    name = "ernie4_5"
    hf_names = ("Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM")
    gguf_names = ("ernie4_5", "ernie4_5-moe")
    hf_pairs = gguf_pairs = "neighbours"
    hf_defaults = MappingProxyType({"tie_word_embeddings": True, "rope_theta": 500_000.0})
    hf_extra_heads = ("model.mtp_",)
    hf_layer_names = MappingProxyType(
        {
            "mlp.moe_statics.e_score_correction_bias": "mlp.router.correction",
            "mlp.shared_experts.gate_proj": "mlp.shared.gate",
            "mlp.shared_experts.up_proj": "mlp.shared.up",
            "mlp.shared_experts.down_proj": "mlp.shared.down",
        }
    )

    @classmethod
    def traits_from_hf(cls, fields: ConfigFields) -> Traits:
        bias = fields.boolean("use_bias", False)
        if bias and fields.get("moe_num_experts"):
            raise ModelUnsupported(f"{fields.origin}: use_bias with experts is not supported")
        return Traits(qkv_bias=bias, output_bias=bias, mlp_bias=bias)

    @classmethod
    def experts_from_hf(cls, fields: ConfigFields) -> Experts | None:
        count = fields.get("moe_num_experts")
        if not count:
            return None
        if isinstance(count, list):
            raise ModelUnsupported(f"{fields.origin}: experts for images ({count}) are not supported")
        layers, inner = fields.layer_count("num_hidden_layers"), fields.integer("moe_intermediate_size")
        first, last = fields.integer("moe_layer_start_index", 1), fields.integer("moe_layer_end_index", -1)
        every = max(fields.integer("moe_layer_interval", 1), 1)
        last = layers - 1 if last == -1 else last
        return Experts(
            count=fields.integer("moe_num_experts"),
            per_token=fields.integer("moe_k"),
            inner_size=inner,
            normalised=True,
            layers=tuple(first <= layer <= last and (layer + 1) % every == 0 for layer in range(layers)),
            correction=True,
            shared_size=inner * fields.integer("moe_num_shared_experts", 0),
        )

    @classmethod
    def traits_from_gguf(cls, fields: ConfigFields, tensors: Collection[str]) -> Traits:
        return Traits(qkv_bias="blk.0.attn_q.bias" in tensors)

    @classmethod
    def experts_from_gguf(cls, fields: ConfigFields) -> Experts | None:
        count = fields.integer("expert_count", 0)
        if not count:
            return None
        layers, dense = fields.layer_count("block_count"), fields.integer("leading_dense_block_count", 1)
        every = max(fields.integer("interleave_moe_layer_step", 1), 1)
        inner = fields.integer("expert_feed_forward_length")
        return Experts(
            count=count,
            per_token=fields.integer("expert_used_count"),
            inner_size=inner,
            normalised=True,
            layers=tuple(layer >= dense and (layer + 1) % every == 0 for layer in range(layers)),
            correction=True,
            shared_size=fields.integer("expert_shared_feed_forward_length", inner * fields.integer("expert_shared_count", 0)),
        )
