"""Qwen3 with a mixture of experts in every layer: otherwise as qwen3.py."""

from __future__ import annotations

from collections.abc import Collection

from baton.errors import ModelUnsupported
from baton.models.architecture import Architecture
from baton.models.config import Experts, Traits
from baton.models.config_fields import Fields
from baton.models.qwen3 import Qwen3


class Qwen3Moe(Architecture):
    name = "qwen3_moe"
    hf_names = ("Qwen3MoeForCausalLM",)
    gguf_name = "qwen3moe"
    gguf_rotary_interleaved = False

    @classmethod
    def traits_from_hf(cls, fields: Fields) -> Traits:
        return Qwen3.traits_from_hf(fields)

    @classmethod
    def experts_from_hf(cls, fields: Fields) -> Experts:
        dense = fields.get("mlp_only_layers") or []
        if dense or fields.integer("decoder_sparse_step", 1) != 1:
            raise ModelUnsupported(f"{fields.origin}: layers without experts among layers with them are not supported")
        # transformers 5 may call them local experts.
        count = fields.integer("num_experts", fields.get("num_local_experts"))
        return Experts(
            count=count,
            per_token=fields.integer("num_experts_per_tok"),
            inner_size=fields.integer("moe_intermediate_size"),
            normalised=fields.boolean("norm_topk_prob", False),
        )

    @classmethod
    def traits_from_gguf(cls, fields: Fields, tensors: Collection[str]) -> Traits:
        raise ModelUnsupported(f"{fields.origin}: mixtures of experts are run from safetensors, not from GGUF files")
