"""Phi-3, Phi-3.5-mini, Phi-4 and Phi-4-mini: fused matrices, rotary positions on a part of each head, optionally a sliding
window.

With `longrope` the context ends at the original one (models/rope_from_hf.py has the reason).
"""

from __future__ import annotations

from collections.abc import Collection
from types import MappingProxyType

from baton.models.architecture import Architecture
from baton.models.config import Traits
from baton.models.config_fields import ConfigFields


class Phi3(Architecture):
    name = "phi3"
    hf_names = ("Phi3ForCausalLM",)
    gguf_names = ("phi3",)
    gguf_layer_names = MappingProxyType({"ffn_up": "mlp.gate_up"})

    @classmethod
    def traits_from_hf(cls, fields: ConfigFields) -> Traits:
        window = fields.integer_or_none("sliding_window", None)
        return _windowed(window, fields.integer("max_position_embeddings"), fields.layer_count("num_hidden_layers"))

    @classmethod
    def traits_from_gguf(cls, fields: ConfigFields, tensors: Collection[str]) -> Traits:
        window = fields.integer_or_none("attention.sliding_window", None)
        return _windowed(window, fields.integer("context_length"), fields.layer_count("block_count"))


def _windowed(window: int | None, context: int, layers: int) -> Traits:
    """Windows by layer. A window as long as the context is ignored."""
    return Traits(layer_windows=(window,) * layers if window and window < context else ())
