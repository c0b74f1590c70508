"""Mixtral: Mistral with a mixture of experts in every layer. Its GGUF files name llama as architecture."""

from __future__ import annotations

from collections.abc import Collection
from types import MappingProxyType

from baton.errors import ModelUnsupported
from baton.models.architecture import Architecture
from baton.models.config import Experts, Traits
from baton.models.config_fields import ConfigFields


class Mixtral(Architecture):
    name = "mixtral"
    hf_names = ("MixtralForCausalLM",)
    gguf_names = ()
    hf_defaults = MappingProxyType({"rope_theta": 1_000_000.0})
    hf_layer_names = MappingProxyType({"block_sparse_moe.gate": "mlp.router"})

    @classmethod
    def traits_from_hf(cls, fields: ConfigFields) -> Traits:
        window = fields.integer_or_none("sliding_window", None)
        return Traits(layer_windows=(window,) * fields.layer_count("num_hidden_layers") if window else ())

    @classmethod
    def experts_from_hf(cls, fields: ConfigFields) -> Experts:
        return Experts(
            count=fields.integer("num_local_experts"),
            per_token=fields.integer("num_experts_per_tok"),
            inner_size=fields.integer("intermediate_size"),
            normalised=True,
        )

    @classmethod
    def traits_from_gguf(cls, fields: ConfigFields, tensors: Collection[str]) -> Traits:
        raise ModelUnsupported(f"{fields.origin}: GGUF files of {cls.name} are of the architecture llama")
