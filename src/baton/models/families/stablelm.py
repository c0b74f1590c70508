"""StableLM 2: LayerNorms with a bias, a quarter of each head rotates, and optionally attention and MLP in parallel."""

from __future__ import annotations

from collections.abc import Collection
from types import MappingProxyType

from baton.errors import ModelUnsupported
from baton.models.architecture import Architecture
from baton.models.config import Traits
from baton.models.config_fields import ConfigFields


class StableLM(Architecture):
    name = "stablelm"
    hf_names = ("StableLmForCausalLM",)
    gguf_names = ("stablelm",)
    hf_defaults = MappingProxyType({"partial_rotary_factor": 0.25, "head_dim": None})

    @classmethod
    def traits_from_hf(cls, fields: ConfigFields) -> Traits:
        if fields.boolean("qk_layernorm", False):
            raise ModelUnsupported(f"{fields.origin}: qk_layernorm (a LayerNorm for every head) is not supported")
        return Traits(
            qkv_bias=fields.boolean("use_qkv_bias", False),
            layer_norm=True,
            norm_bias=True,
            parallel=fields.boolean("use_parallel_residual", False),
        )

    @classmethod
    def norm_eps_from_hf(cls, fields: ConfigFields) -> float:
        return fields.number("layer_norm_eps", 1e-5)

    @classmethod
    def traits_from_gguf(cls, fields: ConfigFields, tensors: Collection[str]) -> Traits:
        if "blk.0.attn_q_norm.weight" in tensors:
            raise ModelUnsupported(f"{fields.origin}: a LayerNorm for every head is not supported")
        return Traits(
            qkv_bias="blk.0.attn_q.bias" in tensors,
            layer_norm=True,
            norm_bias=True,
            parallel="blk.0.ffn_norm.weight" not in tensors,
        )

    @classmethod
    def norm_eps_from_gguf(cls, fields: ConfigFields) -> float:
        return fields.number("attention.layer_norm_epsilon")
