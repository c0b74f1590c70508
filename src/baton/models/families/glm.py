"""GLM-4: half of each head rotates. GLM-4-0414 also has norms after attention and MLP. GLM-4.5 has experts: a sigmoid router
with a correction, shared experts, and dense first layers. GGUF files of GLM-4-9B and ChatGLM3 are named `chatglm`."""

from __future__ import annotations

from collections.abc import Collection
from types import MappingProxyType

from baton.errors import ModelFileBroken, ModelUnsupported
from baton.models.architecture import Architecture
from baton.models.config import Experts, Traits
from baton.models.config_fields import ConfigFields

SIGMOID = 2
"""Values of `expert_gating_func` of a GGUF file."""
HALF = MappingProxyType({"partial_rotary_factor": 0.5})


class Glm(Architecture):
    name = "glm4"
    hf_names = ("GlmForCausalLM", "Glm4ForCausalLM")
    gguf_names = ("glm4", "chatglm")
    hf_pairs = gguf_pairs = "neighbours"
    hf_defaults = HALF
    hf_layer_names = MappingProxyType(
        {"post_self_attn_layernorm": "attention_post_norm", "post_mlp_layernorm": "mlp_post_norm"}
    )
    gguf_layer_names = MappingProxyType(
        {"ffn_up": "mlp.gate_up", "post_attention_norm": "attention_post_norm", "post_ffw_norm": "mlp_post_norm"}
    )

    @classmethod
    def traits_from_hf(cls, fields: ConfigFields) -> Traits:
        after = "Glm4ForCausalLM" in fields.get("architectures", ())
        return Traits(qkv_bias=fields.boolean("attention_bias", True), norms="both" if after else "before")

    @classmethod
    def traits_from_gguf(cls, fields: ConfigFields, tensors: Collection[str]) -> Traits:
        after = "blk.0.post_attention_norm.weight" in tensors
        bias = "blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors  # chatglm has one or the other
        return Traits(qkv_bias=bias, norms="both" if after else "before")


class Glm4Moe(Architecture):
    name = "glm4_moe"
    hf_names = ("Glm4MoeForCausalLM",)
    gguf_names = ("glm4moe",)
    hf_defaults = HALF
    hf_layer_names = MappingProxyType(
        {
            "mlp.gate.e_score_correction_bias": "mlp.router.correction",
            "mlp.shared_experts.gate_proj": "mlp.shared.gate",
            "mlp.shared_experts.up_proj": "mlp.shared.up",
            "mlp.shared_experts.down_proj": "mlp.shared.down",
        }
    )
    gguf_layer_names = MappingProxyType({"post_attention_norm": "mlp_norm"})

    @classmethod
    def traits_from_hf(cls, fields: ConfigFields) -> Traits:
        return Traits(qkv_bias=fields.boolean("attention_bias", False), qk_norm=fields.boolean("use_qk_norm", False))

    @classmethod
    def experts_from_hf(cls, fields: ConfigFields) -> Experts:
        groups = fields.integer("n_group", 1)
        if groups != 1:
            raise ModelUnsupported(f"{fields.origin}: experts in {groups} groups are not supported; supported is one group")
        inner, layers = fields.integer("moe_intermediate_size"), fields.layer_count("num_hidden_layers")
        dense = fields.integer("first_k_dense_replace", 1)
        return Experts(
            count=fields.integer("n_routed_experts"),
            per_token=fields.integer("num_experts_per_tok"),
            inner_size=inner,
            normalised=fields.boolean("norm_topk_prob", True),
            layers=tuple(layer >= dense for layer in range(layers)),
            scoring="sigmoid",
            correction=True,
            scale=fields.positive("routed_scaling_factor", 1.0),
            shared_size=inner * fields.integer("n_shared_experts", 0),
        )

    @classmethod
    def layers_from_gguf(cls, fields: ConfigFields) -> int:
        """Number of layers to run. A file also counts layers that predict more tokens at once, behind the others."""
        count, further = fields.layer_count("block_count"), fields.integer("nextn_predict_layers", 0)
        if not 0 <= further < max(count, 1):
            raise ModelFileBroken(f"{fields.origin}: {further} of {count} layers predict further tokens (nextn_predict_layers)")
        return count - further

    @classmethod
    def traits_from_gguf(cls, fields: ConfigFields, tensors: Collection[str]) -> Traits:
        return Traits(qkv_bias="blk.0.attn_q.bias" in tensors, qk_norm="blk.0.attn_q_norm.weight" in tensors)

    @classmethod
    def experts_from_gguf(cls, fields: ConfigFields) -> Experts:
        gating = fields.integer("expert_gating_func", SIGMOID)
        if gating != SIGMOID:
            raise ModelUnsupported(
                f"{fields.origin}: expert_gating_func {gating} is not supported; supported is {SIGMOID} (sigmoid)"
            )
        dense, inner = fields.integer("leading_dense_block_count", 1), fields.integer("expert_feed_forward_length")
        return Experts(
            count=fields.integer("expert_count"),
            per_token=fields.integer("expert_used_count"),
            inner_size=inner,
            normalised=fields.boolean("expert_weights_norm", True),
            layers=tuple(layer >= dense for layer in range(cls.layers_from_gguf(fields))),
            scoring="sigmoid",
            correction=True,
            scale=fields.positive("expert_weights_scale", 1.0),
            shared_size=inner * fields.integer("expert_shared_count", 0),
        )
