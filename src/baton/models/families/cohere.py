"""Command R, R+ and R7B: attention and MLP in parallel after one LayerNorm, and a factor on the logits. R7B has sliding
windows, and no positions in the layers without one."""

from __future__ import annotations

from collections.abc import Collection
from types import MappingProxyType

from baton.errors import ModelUnsupported
from baton.models.architecture import Architecture, layer_kinds, windows_by_kind
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
            kinds = _with_kinds(fields)
            windows = windows_by_kind(kinds, fields.integer("sliding_window", 4096))
            turned = rope_from_hf(fields)
            ropes = tuple(turned if kind == "sliding_attention" else NO_ROPE for kind in layer_kinds(kinds))
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
        layers, window = fields.layer_count("block_count"), fields.integer_or_none("attention.sliding_window", None)
        full = [window is None or (layer + 1) % FULL_EVERY == 0 for layer in range(layers)]
        rope = RopeConfig(theta=fields.number("rope.freq_base"))
        return Traits(
            layer_norm=True,
            parallel=True,
            logits_scale=fields.positive("logit_scale"),
            layer_windows=tuple(None if whole else window for whole in full) if window else (),
            layer_ropes=tuple(NO_ROPE if whole else rope for whole in full) if window else (),
        )

    @classmethod
    def norm_eps_from_gguf(cls, fields: ConfigFields) -> float:
        return fields.number("attention.layer_norm_epsilon")


def _with_kinds(fields: ConfigFields) -> ConfigFields:
    """Older files give the interval of full layers instead of the kind of each layer."""
    if fields.get("layer_types"):
        return fields
    every = max(fields.integer("sliding_window_pattern", FULL_EVERY), 1)
    layers = range(fields.layer_count("num_hidden_layers"))
    kinds = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in layers]
    return ConfigFields({**fields.values, "layer_types": kinds}, fields.origin)
