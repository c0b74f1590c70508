"""Gemma 3 (text): norms before and after attention and MLP, GELU, scaled embeddings, and for each full layer five with a
sliding window and another rotary base."""

from __future__ import annotations

from collections.abc import Collection
from types import MappingProxyType

from baton.errors import ModelUnsupported
from baton.models.architecture import Architecture, layer_kinds, windows_by_kind, with_layer_kinds
from baton.models.config import RopeConfig, Traits
from baton.models.config_fields import ConfigFields
from baton.models.rope_from_hf import rope_from_hf

FULL_EVERY = 6
LOCAL_THETA = 10000.0


class Gemma3(Architecture):
    name = "gemma3"
    hf_names = ("Gemma3ForCausalLM",)
    gguf_names = ("gemma3",)
    activation = "gelu_tanh"
    norm_plus_one = True
    hf_defaults = MappingProxyType(
        {
            "tie_word_embeddings": True,
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1_000_000.0,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 131_072,
        }
    )
    hf_layer_names = MappingProxyType(
        {
            "post_attention_layernorm": "attention_post_norm",
            "pre_feedforward_layernorm": "mlp_norm",
            "post_feedforward_layernorm": "mlp_post_norm",
        }
    )
    gguf_layer_names = MappingProxyType({"post_attention_norm": "attention_post_norm", "post_ffw_norm": "mlp_post_norm"})

    @classmethod
    def traits_from_hf(cls, fields: ConfigFields) -> Traits:
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if fields.get(key) is not None:
                raise ModelUnsupported(f"{fields.origin}: {key} is not supported")
        if fields.get("use_bidirectional_attention"):
            raise ModelUnsupported(f"{fields.origin}: use_bidirectional_attention is not supported")
        kinds = with_layer_kinds(fields, max(fields.integer("sliding_window_pattern", FULL_EVERY), 1))
        return _traits(
            windows_by_kind(kinds, fields.integer("sliding_window", 4096)),
            tuple(_rope(fields, kind) for kind in layer_kinds(kinds)),
            fields.integer("hidden_size"),
            fields.positive("query_pre_attn_scalar"),
            bias=fields.boolean("attention_bias", False),
        )

    @classmethod
    def rope_from_hf(cls, fields: ConfigFields) -> RopeConfig:
        return _rope(fields, "full_attention")

    @classmethod
    def traits_from_gguf(cls, fields: ConfigFields, tensors: Collection[str]) -> Traits:
        window, full = fields.integer("attention.sliding_window"), _full_layers(fields)
        hidden, heads = fields.integer("embedding_length"), max(fields.integer("attention.head_count"), 1)
        return _traits(
            tuple(None if whole else window for whole in full),
            (),  # set by layer_ropes_from_gguf
            hidden,
            # llama.cpp uses the head width for all sizes but the largest (27B), whose scale derives from its hidden size.
            hidden / heads if len(full) == LAYERS_OF_27B else fields.positive("attention.key_length"),
        )

    @classmethod
    def layer_ropes_from_gguf(cls, fields: ConfigFields, rope: RopeConfig) -> tuple[RopeConfig, ...]:
        """Rotary settings by layer. The file's scaling is that of full layers."""
        local = RopeConfig(theta=fields.number("rope.freq_base_swa", LOCAL_THETA), dimensions=rope.dimensions)
        return tuple(rope if whole else local for whole in _full_layers(fields))


LAYERS_OF_27B = 62


def _traits(
    windows: tuple[int | None, ...], ropes: tuple[RopeConfig, ...], hidden: int, scalar: float, *, bias: bool = False
) -> Traits:
    return Traits(
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        layer_windows=windows,
        layer_ropes=ropes,
        activation="gelu_tanh",
        norms="both",
        embedding_scale=hidden**0.5,
        attention_scale=scalar**-0.5,
    )


def _full_layers(fields: ConfigFields) -> list[bool]:
    """Layers of a GGUF file without a window."""
    return [(layer + 1) % FULL_EVERY == 0 for layer in range(fields.layer_count("block_count"))]


def _rope(fields: ConfigFields, kind: str) -> RopeConfig:
    settings = fields.get("rope_parameters")
    if isinstance(settings, dict) and kind in settings:
        return rope_from_hf(fields, kind)
    if kind == "full_attention":
        return rope_from_hf(fields)
    return RopeConfig(theta=fields.number("rope_local_base_freq", LOCAL_THETA))
