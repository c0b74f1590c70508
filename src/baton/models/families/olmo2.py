"""OLMo 2 and 3: norms after attention and MLP instead of before them; query and key norms over all heads as one row. OLMo 3 has
sliding windows on three layers of four, with other rotary settings."""

from __future__ import annotations

from collections.abc import Collection
from types import MappingProxyType

from baton.models.architecture import Architecture, layer_kinds, windows_by_kind, with_layer_kinds
from baton.models.config import RopeConfig, Traits
from baton.models.config_fields import ConfigFields
from baton.models.rope_from_hf import rope_from_hf

FULL_EVERY = 4
THETA_OF_THIRD = 500_000.0


class Olmo2(Architecture):
    name = "olmo2"
    hf_names = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
    gguf_names = ("olmo2",)
    hf_layer_names = MappingProxyType(
        {"post_attention_layernorm": "attention_post_norm", "post_feedforward_layernorm": "mlp_post_norm"}
    )
    gguf_layer_names = MappingProxyType({"post_attention_norm": "attention_post_norm", "post_ffw_norm": "mlp_post_norm"})

    @classmethod
    def traits_from_hf(cls, fields: ConfigFields) -> Traits:
        bias = fields.boolean("attention_bias", False)
        windows: tuple[int | None, ...] = ()
        ropes: tuple[RopeConfig, ...] = ()
        if _is_third(fields):
            kinds = with_layer_kinds(fields, FULL_EVERY)
            windows = windows_by_kind(kinds, fields.integer_or_none("sliding_window", 4096))
            ropes = tuple(_rope(fields, kind) for kind in layer_kinds(kinds))
        return Traits(
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=True,
            qk_norm_across_heads=True,
            norms="after",
            layer_windows=windows,
            layer_ropes=ropes,
        )

    @classmethod
    def rope_from_hf(cls, fields: ConfigFields) -> RopeConfig:
        return _rope(fields, "full_attention")

    @classmethod
    def traits_from_gguf(cls, fields: ConfigFields, tensors: Collection[str]) -> Traits:
        windows = _windows_from_gguf(fields)
        return Traits(qk_norm=True, qk_norm_across_heads=True, norms="after", layer_windows=windows)

    @classmethod
    def layer_ropes_from_gguf(cls, fields: ConfigFields, rope: RopeConfig) -> tuple[RopeConfig, ...]:
        """The file's scaling is that of full layers."""
        local = RopeConfig(theta=fields.number("rope.freq_base_swa", rope.theta), dimensions=rope.dimensions)
        return tuple(rope if window is None else local for window in _windows_from_gguf(fields))


def _windows_from_gguf(fields: ConfigFields) -> tuple[int | None, ...]:
    """Windows of OLMo 3, whose files are named as OLMo 2's. Other layers than these are refused (config_from_gguf.py)."""
    window = fields.integer_or_none("attention.sliding_window", None)
    layers = range(fields.layer_count("block_count"))
    return tuple(window if (layer + 1) % FULL_EVERY else None for layer in layers) if window else ()


def _is_third(fields: ConfigFields) -> bool:
    return "Olmo3ForCausalLM" in fields.get("architectures", ())


def _rope(fields: ConfigFields, kind: str) -> RopeConfig:
    """Rotary settings of layers with full attention or windows. Files of transformers 4 have one `rope_scaling`, which is that
    of full layers."""
    if not _is_third(fields):
        return rope_from_hf(fields)
    theta = fields.number("rope_theta", THETA_OF_THIRD)
    settings = fields.get("rope_parameters")
    if kind == "full_attention" or (isinstance(settings, dict) and kind in settings):
        return rope_from_hf(ConfigFields({**fields.values, "rope_theta": theta}, fields.origin), kind)
    return RopeConfig(theta=theta)
