"""Command R, R+ and R7B: attention and MLP in parallel after one LayerNorm, and a factor on the logits. R7B has sliding
windows, and no positions in the layers without one."""

from __future__ import annotations

from collections.abc import Collection
from types import MappingProxyType

from baton.errors import ModelUnsupported
from baton.models.architecture import Architecture, layer_kinds, windows_by_kind, with_layer_kinds
from baton.models.config import NO_ROPE, RopeConfig, Traits
from baton.models.config_fields import ConfigFields
from baton.models.rope_from_hf import rope_from_hf

FULL_EVERY = 4


class Cohere(Architecture):
    name = "cohere"
    hf_names = ("CohereForCausalLM", "Cohere2ForCausalLM")
    gguf_names = ("command-r", "cohere2")
    hf_pairs = gguf_pairs = "neighbours"
    hf_defaults = MappingProxyType({"tie_word_embeddings": True})

    @classmethod
    def traits_from_hf(cls, fields: ConfigFields) -> Traits:
        if fields.get("use_qk_norm"):
            raise ModelUnsupported(f"{fields.origin}: use_qk_norm (a LayerNorm for every head) is not supported")
        bias = fields.boolean("attention_bias", False)
        windows: tuple[int | None, ...] = ()
        ropes: tuple[RopeConfig, ...] = ()
        if "Cohere2ForCausalLM" in fields.get("architectures", ()):
            kinds = with_layer_kinds(fields, max(fields.integer("sliding_window_pattern", FULL_EVERY), 1))
            windows = windows_by_kind(kinds, fields.integer("sliding_window", 4096))
            rope = rope_from_hf(fields)
            ropes = tuple(rope if kind == "sliding_attention" else NO_ROPE for kind in layer_kinds(kinds))
        return Traits(
            qkv_bias=bias,
            output_bias=bias,
            layer_norm=True,
            parallel=True,
            logits_scale=fields.positive("logit_scale", 0.0625),
            layer_windows=windows,
            layer_ropes=ropes,
        )

    @classmethod
    def norm_eps_from_hf(cls, fields: ConfigFields) -> float:
        return fields.number("layer_norm_eps", 1e-5)

    @classmethod
    def traits_from_gguf(cls, fields: ConfigFields, tensors: Collection[str]) -> Traits:
        return Traits(
            layer_norm=True,
            parallel=True,
            logits_scale=fields.positive("logit_scale"),
            layer_windows=_windows_from_gguf(fields),
        )

    @classmethod
    def layer_ropes_from_gguf(cls, fields: ConfigFields, rope: RopeConfig) -> tuple[RopeConfig, ...]:
        return tuple(NO_ROPE if window is None else rope for window in _windows_from_gguf(fields))

    @classmethod
    def norm_eps_from_gguf(cls, fields: ConfigFields) -> float:
        return fields.number("attention.layer_norm_epsilon")


def _windows_from_gguf(fields: ConfigFields) -> tuple[int | None, ...]:
    window = fields.integer_or_none("attention.sliding_window", None)
    layers = range(fields.layer_count("block_count"))
    return tuple(window if (layer + 1) % FULL_EVERY else None for layer in layers) if window else ()
