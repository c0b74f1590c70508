"""gpt-oss: experts in every layer with biases and a clamped SwiGLU, stored in MXFP4; a sink per head; every other layer has a
sliding window; YaRN, whose ramp is not rounded to whole dimensions."""

from __future__ import annotations

from collections.abc import Collection
from types import MappingProxyType

from baton.errors import ModelUnsupported
from baton.models.architecture import Architecture, windows_by_kind, with_layer_kinds
from baton.models.config import OAI_LIMIT, OAI_SLOPE, Experts, Traits
from baton.models.config_fields import ConfigFields

FULL_EVERY = 2


class GptOss(Architecture):
    name = "gpt_oss"
    hf_names = ("GptOssForCausalLM",)
    gguf_names = ("gpt-oss",)
    hf_stacked_experts = True
    gguf_yarn_truncates = False
    hf_defaults = MappingProxyType({"head_dim": 64, "rope_theta": 150_000.0, "sliding_window": 128})
    hf_layer_names = MappingProxyType(
        {
            "self_attn.sinks": "attention.sinks",
            "mlp.router": "mlp.router",
            **{
                f"mlp.experts.{part}_proj{end}": f"mlp.stacked.{part}{end}"
                for part in ("gate_up", "down")
                for end in ("", "_blocks", "_scales", "_bias")
            },
        }
    )
    gguf_layer_names = MappingProxyType({"attn_sinks.weight": "attention.sinks", "post_attention_norm": "mlp_norm"})

    @classmethod
    def traits_from_hf(cls, fields: ConfigFields) -> Traits:
        for key, wanted in (("swiglu_limit", OAI_LIMIT), ("swiglu_alpha", OAI_SLOPE)):
            if fields.number(key, wanted) != wanted:
                raise ModelUnsupported(f"{fields.origin}: {key} is {fields.get(key)}; supported is {wanted}")
        bias = fields.boolean("attention_bias", True)
        return _traits(windows_by_kind(with_layer_kinds(fields, FULL_EVERY), fields.integer("sliding_window")), bias=bias)

    @classmethod
    def experts_from_hf(cls, fields: ConfigFields) -> Experts:
        return Experts(
            count=fields.integer("num_local_experts"),
            per_token=fields.integer("num_experts_per_tok", 4),
            inner_size=fields.integer("intermediate_size"),
            normalised=True,
            bias=True,
        )

    @classmethod
    def traits_from_gguf(cls, fields: ConfigFields, tensors: Collection[str]) -> Traits:
        window = fields.integer("attention.sliding_window")
        layers = range(fields.layer_count("block_count"))
        return _traits(tuple(None if layer % 2 else window for layer in layers), bias="blk.0.attn_q.bias" in tensors)

    @classmethod
    def experts_from_gguf(cls, fields: ConfigFields) -> Experts:
        return Experts(
            count=fields.integer("expert_count"),
            per_token=fields.integer("expert_used_count"),
            inner_size=fields.integer("expert_feed_forward_length", fields.get("feed_forward_length")),
            normalised=True,
            bias=True,
        )


def _traits(windows: tuple[int | None, ...], *, bias: bool) -> Traits:
    return Traits(qkv_bias=bias, output_bias=bias, sinks=True, activation="swiglu_oai", layer_windows=windows)
