"""Rotary settings of a config.json.

There are two generations of the format: transformers 4 wrote `rope_theta` and `rope_scaling`, transformers 5 writes both into
`rope_parameters`, which may hold one table per kind of layer.
"""

from __future__ import annotations

import math

from baton.errors import ModelFileBroken, ModelUnsupported
from baton.models.config import FrequencyDivisors, LinearScaling, Llama3Scaling, RopeConfig, RopeScaling, YarnScaling
from baton.models.config_fields import ConfigFields
from baton.models.portable_logarithm import logarithm

SUPPORTED = "default, linear, llama3, yarn and, within the original context, longrope"

DIMENSIONS_MAX = 2**31
"""Maximum of dimensions that is read; more are refused anyway (ModelConfig)."""


def rope_from_hf(fields: ConfigFields, kind: str = "") -> RopeConfig:
    """Rotary settings of a config.json. `kind`: the kind of layers, if the file has a table per kind."""
    raw = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if isinstance(raw, dict) and kind and kind in raw:
        raw = raw[kind]
    if not isinstance(raw, dict):
        raise ModelFileBroken(f"{fields.origin}: the rotary settings are {raw!r}; they must be a table of settings")
    rope = ConfigFields(raw, f"{fields.origin}, rotary settings")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    return RopeConfig(theta=theta, scaling=_scaling(rope, fields), dimensions=_dimensions(rope, fields))


def _dimensions(rope: ConfigFields, fields: ConfigFields) -> int | None:
    share = rope.positive("partial_rotary_factor", fields.positive("partial_rotary_factor", 1.0))
    return None if share == 1.0 else int(min(head_dim_of(fields) * share, DIMENSIONS_MAX))


def head_dim_of(fields: ConfigFields) -> int:
    return fields.integer("head_dim", fields.integer("hidden_size") // max(fields.integer("num_attention_heads"), 1))


def _scaling(rope: ConfigFields, fields: ConfigFields) -> RopeScaling | None:
    """The scaling of rotary angles in the model's config. None: none. Raises ModelUnsupported for an unknown kind."""
    context = fields.integer("max_position_embeddings")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=rope.number("factor"))
    if kind in ("longrope", "su"):
        return _short_of_long(rope, fields)
    original = rope.integer("original_max_position_embeddings", context)
    if kind == "llama3":
        return Llama3Scaling(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_context=original,
        )
    if kind == "yarn":
        factor = rope.number("factor", context / max(original, 1))
        return YarnScaling(
            factor=factor,
            original_context=original,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            attention_factor=_yarn_attention_factor(rope, factor),
            truncate=rope.boolean("truncate", True),
        )
    raise ModelUnsupported(f"{rope.origin}: rotary scaling {kind} is not supported; supported are {SUPPORTED}")


def longrope_context(fields: ConfigFields) -> int | None:
    """Positions up to which longrope's short factors hold. Beyond it the model rotates *all* keys differently, including cached
    ones, so the context ends there. None: another scaling, or none."""
    raw = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(raw, dict) or (raw.get("rope_type") or raw.get("type")) not in ("longrope", "su"):
        return None
    rope = ConfigFields(raw, f"{fields.origin}, rotary settings")
    return rope.integer("original_max_position_embeddings", fields.get("original_max_position_embeddings"))


def _short_of_long(rope: ConfigFields, fields: ConfigFields) -> RopeScaling:
    divisors = rope.get("short_factor")
    if not isinstance(divisors, list) or not all(isinstance(d, int | float) and d > 0 for d in divisors):
        raise ModelFileBroken(f"{rope.origin}: short_factor must be a list of positive numbers")
    original = longrope_context(fields) or 0
    factor = rope.number("factor", fields.integer("max_position_embeddings") / max(original, 1))
    growth = 1.0
    if factor > 1 and original > 1:
        growth = math.sqrt(1 + logarithm(factor) / logarithm(float(original)))
    factor = rope.number("attention_factor", growth)
    return FrequencyDivisors(divisors=tuple(map(float, divisors)), attention_factor=factor)


def _yarn_attention_factor(rope: ConfigFields, factor: float) -> float:
    def growth(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * logarithm(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return growth(rope.number("mscale")) / growth(rope.number("mscale_all_dim"))
    return growth(1.0)
