"""A Hugging Face config.json (and generation_config.json) becomes a ModelConfig.

Two generations of the format are about: transformers 4 wrote `rope_theta` and `rope_scaling`, transformers 5 writes
both into `rope_parameters`. Settings that would change the result and that we do not run are refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.errors import ModelFileBroken, ModelUnsupported
from baton.models.config import LinearScaling, Llama3Scaling, ModelConfig, RopeConfig, RopeScaling, YarnScaling
from baton.models.config_fields import Fields
from baton.models.portable_math import logarithm
from baton.models.support import supported_architecture


def config_from_hf(
    raw: Mapping[str, Any], origin: str = "config.json", generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """`raw` is config.json, `generation` is generation_config.json if there is one, `origin` is what errors name."""
    fields = Fields(raw, origin)
    model = supported_architecture(raw, origin)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    return ModelConfig(
        architecture=model.name,
        vocab_size=fields.integer("vocab_size"),
        layers=fields.layer_count("num_hidden_layers"),
        hidden_size=hidden,
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", hidden // max(heads, 1)),
        intermediate_size=fields.integer("intermediate_size"),
        rope=_rope(fields),
        norm_eps=fields.number("rms_norm_eps"),
        tied_embeddings=fields.boolean("tie_word_embeddings", False),
        traits=model.traits_from_hf(fields),
        experts=model.experts_from_hf(fields),
        context_tokens_max=fields.integer("max_position_embeddings"),
        bos_id=next(iter(fields.token_ids("bos_token_id")), None),
        # generation_config.json goes first: for chat models it lists the end of a turn, which config.json may not.
        eos_ids=Fields(generation or {}, "generation_config.json").token_ids("eos_token_id")
        or fields.token_ids("eos_token_id"),
    )


def _rope(fields: Fields) -> RopeConfig:
    raw = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(raw, dict):
        raise ModelFileBroken(f"{fields.origin}: the rotary settings are {raw!r}; they must be a table of settings")
    rope = Fields(raw, f"{fields.origin}, rotary settings")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelUnsupported(f"{fields.origin}: partial_rotary_factor {partial} is not supported; supported is 1.0")
    return RopeConfig(theta=theta, scaling=_scaling(rope, fields.integer("max_position_embeddings")))


def _scaling(rope: Fields, context: int) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=rope.number("factor"))
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
    raise ModelUnsupported(
        f"{rope.origin}: rotary scaling {kind} is not supported; supported are default, linear, llama3, yarn"
    )


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    def growth(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * logarithm(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return growth(rope.number("mscale")) / growth(rope.number("mscale_all_dim"))
    return growth(1.0)
