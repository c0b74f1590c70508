"""Builds a ModelConfig from a Hugging Face config.json (and generation_config.json).

Unsupported settings that change the result are refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.models.config import ModelConfig
from baton.models.config_fields import ConfigFields
from baton.models.rope_from_hf import head_dim_of, longrope_context
from baton.models.support import supported_architecture
from baton.models.text_part import text_config


def config_from_hf(
    raw: Mapping[str, Any], origin: str = "config.json", generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """The config of a model's folder. `raw`: config.json. `generation`: generation_config.json if there is one. `origin`: the
    name in errors."""
    raw = text_config(raw, origin)
    model = supported_architecture(raw, origin)
    fields = ConfigFields({**model.hf_defaults, **raw}, origin)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    return ModelConfig(
        architecture=model.name,
        vocab_size=fields.integer("vocab_size"),
        layers=fields.layer_count("num_hidden_layers"),
        hidden_size=hidden,
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=head_dim_of(fields),
        intermediate_size=model.mlp_size_from_hf(fields),
        rope=model.rope_from_hf(fields),
        norm_eps=model.norm_eps_from_hf(fields),
        tied_embeddings=fields.boolean("tie_word_embeddings", False),
        traits=model.traits_from_hf(fields),
        experts=model.experts_from_hf(fields),
        context_tokens_max=longrope_context(fields) or fields.integer("max_position_embeddings"),
        bos_id=next(iter(fields.token_ids("bos_token_id")), None),
        # generation_config.json first: for chat models it lists the end of a turn, which config.json may not.
        eos_ids=ConfigFields(generation or {}, "generation_config.json").token_ids("eos_token_id")
        or fields.token_ids("eos_token_id"),
    )
