"""Qwen3 (dense): no biases, but every query and key head is normalised before the rotation."""

from __future__ import annotations

from collections.abc import Collection

from baton.models.architecture import Architecture
from baton.models.config import Traits
from baton.models.config_fields import ConfigFields
from baton.models.families.qwen2 import qwen_windows


class Qwen3(Architecture):
    name = "qwen3"
    hf_names = ("Qwen3ForCausalLM",)
    gguf_names = ("qwen3",)

    @classmethod
    def traits_from_hf(cls, fields: ConfigFields) -> Traits:
        bias = fields.boolean("attention_bias", False)
        return Traits(qkv_bias=bias, output_bias=bias, qk_norm=True, layer_windows=qwen_windows(fields))

    @classmethod
    def traits_from_gguf(cls, fields: ConfigFields, tensors: Collection[str]) -> Traits:
        return Traits(qk_norm=True)
