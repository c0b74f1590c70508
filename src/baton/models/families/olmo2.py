"""OLMo 2 and 3: norms after attention and MLP instead of before them; query and key norms over all heads as one row. OLMo 3 has
sliding windows on three layers of four, with other rotary settings."""

from __future__ import annotations

from collections.abc import Collection
from types import MappingProxyType

from baton.models.architecture import Architecture, layer_kinds, windows_by_kind
from baton.models.config import RopeConfig, Traits
from baton.models.config_fields import ConfigFields
from baton.models.rope_from_hf import rope_from_hf


class Olmo2(Architecture):
    name = "olmo2"
    hf_names = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
    gguf_names = ("olmo2",)
    hf_layer_names = MappingProxyType(
        {"post_attention_layernorm": "attention_post_norm", "post_feedforward_layernorm": "mlp_post_norm"}
    )
    gguf_layer_names = MappingProxyType({"post_attention_norm": "attention_post_norm", "post_ffw_norm": "mlp_post_norm"})

    @classmethod
    def traits_from_hf(cls, fields: ConfigFields) -> Traits:
        bias = fields.boolean("attention_bias", False)
        windows: tuple[int | None, ...] = ()
        ropes: tuple[RopeConfig, ...] = ()
        if fields.get("layer_types"):
            windows = windows_by_kind(fields, fields.integer_or_none("sliding_window", None))
            ropes = tuple(rope_from_hf(fields, kind) for kind in layer_kinds(fields))
        return Traits(
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=True,
            qk_norm_across_heads=True,
            norms="after",
            layer_windows=windows,
            layer_ropes=ropes,
        )

    @classmethod
    def rope_from_hf(cls, fields: ConfigFields) -> RopeConfig:
        return rope_from_hf(fields, "full_attention")

    @classmethod
    def traits_from_gguf(cls, fields: ConfigFields, tensors: Collection[str]) -> Traits:
        return Traits(qk_norm=True, qk_norm_across_heads=True, norms="after")
