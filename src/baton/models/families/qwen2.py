"""Qwen2 and Qwen2.5: biases on queries, keys and values; optionally a sliding window on the upper layers."""

from __future__ import annotations

from collections.abc import Collection

from baton.errors import ModelUnsupported
from baton.models.architecture import Architecture
from baton.models.config import Traits
from baton.models.config_fields import ConfigFields


class Qwen2(Architecture):
    name = "qwen2"
    hf_names = ("Qwen2ForCausalLM",)
    gguf_names = ("qwen2",)

    @classmethod
    def traits_from_hf(cls, fields: ConfigFields) -> Traits:
        return Traits(qkv_bias=True, layer_windows=qwen_windows(fields))

    @classmethod
    def traits_from_gguf(cls, fields: ConfigFields, tensors: Collection[str]) -> Traits:
        return Traits(qkv_bias=True)


def qwen_windows(fields: ConfigFields) -> tuple[int | None, ...]:
    """Windows by layer: from `layer_types` if given, else on layers from `max_window_layers` on."""
    layers = fields.layer_count("num_hidden_layers")
    window = fields.integer_or_none("sliding_window", None)
    if not fields.boolean("use_sliding_window", False) or window is None:
        return ()
    kinds = fields.get("layer_types")
    if kinds is None:
        first = fields.integer("max_window_layers")
        return tuple(window if layer >= first else None for layer in range(layers))
    known = {"sliding_attention": window, "full_attention": None}
    if not isinstance(kinds, list) or not all(isinstance(kind, str) and kind in known for kind in kinds):
        raise ModelUnsupported(f"{fields.origin}: layer_types is {kinds!r}; we run lists of {', '.join(known)}")
    return tuple(known[kind] for kind in kinds)
