"""EXAONE 4: norms after attention and MLP instead of before them, and a query and key norm for each head. The 32B has sliding
windows on three layers of four; its other layers have no positions."""

from __future__ import annotations

from collections.abc import Collection
from types import MappingProxyType

from baton.models.architecture import Architecture, layer_kinds, with_layer_kinds
from baton.models.config import NO_ROPE, RopeConfig, Traits
from baton.models.config_fields import ConfigFields
from baton.models.rope_from_hf import rope_from_hf

FULL_EVERY = 4


class Exaone4(Architecture):
    name = "exaone4"
    hf_names = ("Exaone4ForCausalLM",)
    gguf_names = ("exaone4",)
    hf_layer_names = MappingProxyType(
        {"post_attention_layernorm": "attention_post_norm", "post_feedforward_layernorm": "mlp_post_norm"}
    )
    gguf_layer_names = MappingProxyType({"post_attention_norm": "attention_post_norm", "post_ffw_norm": "mlp_post_norm"})

    @classmethod
    def traits_from_hf(cls, fields: ConfigFields) -> Traits:
        window = fields.integer_or_none("sliding_window", 4096)
        if not window:
            return _traits([None] * fields.layer_count("num_hidden_layers"), ())
        kinds = fields if fields.get("layer_types") else with_layer_kinds(fields, _full_every(fields))
        windows = [window if kind == "sliding_attention" else None for kind in layer_kinds(kinds)]
        return _traits(windows, _layer_ropes(windows, rope_from_hf(fields)))

    @classmethod
    def traits_from_gguf(cls, fields: ConfigFields, tensors: Collection[str]) -> Traits:
        return _traits(_windows_from_gguf(fields), ())  # layer_ropes_from_gguf

    @classmethod
    def layer_ropes_from_gguf(cls, fields: ConfigFields, rope: RopeConfig) -> tuple[RopeConfig, ...]:
        windows = _windows_from_gguf(fields)
        return _layer_ropes(windows, rope) if any(windows) else ()


def _traits(windows: list[int | None], ropes: tuple[RopeConfig, ...]) -> Traits:
    return Traits(qk_norm=True, norms="after", layer_windows=tuple(windows) if any(windows) else (), layer_ropes=ropes)


def _layer_ropes(windows: list[int | None], rope: RopeConfig) -> tuple[RopeConfig, ...]:
    """With windows, only their layers have positions."""
    return tuple(NO_ROPE if window is None else rope for window in windows)


def _full_every(fields: ConfigFields) -> int:
    return max(fields.integer("sliding_window_pattern", FULL_EVERY), 1)


def _windows_from_gguf(fields: ConfigFields) -> list[int | None]:
    """Other layers than these are refused (config_from_gguf.py)."""
    window = fields.integer_or_none("attention.sliding_window", None) or None
    return [window if (layer + 1) % FULL_EVERY else None for layer in range(fields.layer_count("block_count"))]
