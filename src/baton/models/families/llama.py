"""Llama 2 and 3, SmolLM2, Mistral: the plain decoder, with optional biases and, for Mistral, a sliding window."""

from __future__ import annotations

from collections.abc import Collection

from baton.errors import ModelUnsupported
from baton.models.architecture import Architecture
from baton.models.config import Experts, Traits
from baton.models.config_fields import ConfigFields
from baton.models.missing_traits import SCALED_QUERIES

MISTRAL_WINDOW_DEFAULT = 4096
"""Default window of a Mistral config.json without the key. A null there means no window."""


class Llama(Architecture):
    name = "llama"
    hf_names = ("LlamaForCausalLM", "MistralForCausalLM")
    gguf_names = ("llama", "mistral3")
    gguf_pairs = "neighbours"

    @classmethod
    def traits_from_hf(cls, fields: ConfigFields) -> Traits:
        if "MistralForCausalLM" in fields.get("architectures", ()):
            window = fields.integer_or_none("sliding_window", MISTRAL_WINDOW_DEFAULT)
            return Traits(layer_windows=(window,) * fields.layer_count("num_hidden_layers") if window else ())
        bias = fields.boolean("attention_bias", False)
        return Traits(qkv_bias=bias, output_bias=bias, mlp_bias=fields.boolean("mlp_bias", False))

    @classmethod
    def traits_from_gguf(cls, fields: ConfigFields, tensors: Collection[str]) -> Traits:
        if fields.number("attention.temperature_scale", 0.0):  # Ministral 3
            raise ModelUnsupported(f"{fields.origin}: {SCALED_QUERIES} (attention.temperature_scale) are not supported")
        window = fields.integer_or_none("attention.sliding_window", None)
        return Traits(
            qkv_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_gate.bias" in tensors,
            layer_windows=(window,) * fields.layer_count("block_count") if window else (),
        )

    @classmethod
    def experts_from_gguf(cls, fields: ConfigFields) -> Experts | None:
        """Experts of Mixtral, whose GGUF files have this architecture name."""
        count = fields.integer("expert_count", 0)
        if not count:
            return None
        inner = fields.integer("feed_forward_length")
        return Experts(count=count, per_token=fields.integer("expert_used_count"), inner_size=inner, normalised=True)
