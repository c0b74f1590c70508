"""Builds a ModelConfig from the metadata of a GGUF file.

Keys carry the architecture as a prefix ("llama.block_count"). Missing facts are derived from its tensors: a separate output
head, biases, and Llama 3's rotary scaling, which is stored as a tensor of divisors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from baton.errors import ModelFileBroken, ModelUnsupported
from baton.models.config import (
    Experts,
    FrequencyDivisors,
    LinearScaling,
    ModelConfig,
    RopeConfig,
    RopeScaling,
    Traits,
    YarnScaling,
)
from baton.models.config_fields import ConfigFields
from baton.models.loaders.gguf_reader import GGUFFile
from baton.models.portable_logarithm import logarithm
from baton.models.registry import architecture_of_gguf

ROPE_DIVISORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    origin = str(file.path)
    top = ConfigFields(file.metadata, origin)
    name = top.text("general.architecture")
    model = architecture_of_gguf(name, origin)
    fields = ConfigFields(file.metadata, origin, prefix=f"{name}.")
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden // max(heads, 1))
    rope = _rope(fields, file, head_dim, truncates=model.gguf_yarn_truncates)
    traits = replace(model.traits_from_gguf(fields, file.tensors), layer_ropes=model.layer_ropes_from_gguf(fields, rope))
    experts = model.experts_from_gguf(fields)
    _refuse_unsupported_parts(fields, head_dim, traits, experts)
    return ModelConfig(
        architecture=model.name,
        vocab_size=_vocab_size(file),
        layers=model.layers_from_gguf(fields),
        hidden_size=hidden,
        heads=heads,
        kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("feed_forward_length"),
        rope=rope,
        norm_eps=model.norm_eps_from_gguf(fields),
        tied_embeddings="output.weight" not in file.tensors,
        traits=traits,
        experts=experts,
        context_tokens_max=_context(fields, file),
        bos_id=top.integer_or_none("tokenizer.ggml.bos_token_id", None),
        eos_ids=_eos_ids(top),
    )


def _refuse_unsupported_parts(fields: ConfigFields, head_dim: int, traits: Traits, mixture: Experts | None) -> None:
    def refuse_unless(ok: bool, what: str) -> None:
        if not ok:
            raise ModelUnsupported(f"{fields.origin}: {what}")

    parts = ConfigFields(fields.values, fields.origin).integer("split.count", 1)
    refuse_unless(parts <= 1, f"this is one of {parts} parts; merge them into one file with `llama-gguf-split --merge`")
    experts, name = fields.integer("expert_count", 0), fields.prefix[:-1]
    refuse_unless(experts == 0 or mixture is not None, f"a mixture of {experts} experts is not supported for {name}")
    values = fields.integer("attention.value_length", head_dim)
    refuse_unless(values == head_dim, f"value heads of {values} beside key heads of {head_dim} are not supported")
    # llama.cpp's converter then stores queries and keys in another order.
    refuse_unless(not any(fields.integers("rope.dimension_sections")), "rotary positions in sections are not supported")
    window = fields.integer("attention.sliding_window", 0)
    refuse_unless(bool(traits.layer_windows) or window == 0, f"a sliding window ({window}) is not supported for {name}")
    if window:
        _refuse_other_windows(fields, traits.layer_windows)
    usual = max(head_dim, 1) ** -0.5 if traits.attention_scale is None else traits.attention_scale
    scale = fields.number("attention.scale", usual)
    refuse_unless(math.isclose(scale, usual, rel_tol=1e-5), f"attention scale {scale} is not supported")


def _refuse_other_windows(fields: ConfigFields, windows: Sequence[int | None]) -> None:
    """Refuses windows that differ from the family's. A file may name the layers with a window: one truth value each, or a
    period whose last layer has none."""
    pattern = fields.get("attention.sliding_window_pattern")
    ours = [window is not None for window in windows]
    if isinstance(pattern, bool) or not isinstance(pattern, int | list):
        named = ours if pattern is None else []
    elif isinstance(pattern, int):
        named = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(len(ours))]
    else:
        named = [bool(each) for each in pattern[: len(ours)]]
    if named != ours:
        full = [layer for layer, has in enumerate(ours) if not has]
        raise ModelUnsupported(
            f"{fields.origin}: sliding_window_pattern names other layers than those that are computed with a window "
            f"(all but {full or 'none'})"
        )


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFileBroken(f"{file.path}: the tensor token_embd.weight is missing, so the vocabulary is unknown")
    if len(embedding.shape) != 2:
        raise ModelFileBroken(f"{file.path}: token_embd.weight has {len(embedding.shape)} dimensions; a matrix has 2")
    return embedding.shape[0]


def _rope(fields: ConfigFields, file: GGUFFile, head_dim: int, *, truncates: bool) -> RopeConfig:
    rotated = fields.integer("rope.dimension_count", head_dim)
    return RopeConfig(
        theta=fields.number("rope.freq_base", 10000.0),
        scaling=_scaling(fields, file, truncates=truncates),
        dimensions=None if rotated == head_dim else rotated,
    )


def _context(fields: ConfigFields, file: GGUFFile) -> int:
    """The original context, if there are long factors (models/rope_from_hf.py has the reason)."""
    context = fields.integer("context_length")
    return fields.integer("rope.scaling.original_context_length", context) if SHORT_FACTORS in file.tensors else context


def _scaling(fields: ConfigFields, file: GGUFFile, *, truncates: bool) -> RopeScaling | None:
    if ROPE_DIVISORS in file.tensors:
        return FrequencyDivisors(divisors=file.floats(ROPE_DIVISORS))
    if SHORT_FACTORS in file.tensors:
        factor = fields.number("rope.scaling.attn_factor", 1.0)
        return FrequencyDivisors(divisors=file.floats(SHORT_FACTORS), attention_factor=factor)
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 0.0))  # older files have the second key
    kind = fields.get("rope.scaling.type", "linear")
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind != "linear":
        factor = fields.number("rope.scaling.factor")
    if kind == "linear":
        return LinearScaling(factor=factor)
    if kind == "yarn":
        return _yarn(fields, factor, truncates=truncates)
    raise ModelUnsupported(
        f"{fields.origin}: rotary scaling {kind} is not supported; supported are none, linear, yarn and the tensor "
        f"{ROPE_DIVISORS}"
    )


def _yarn(fields: ConfigFields, factor: float, *, truncates: bool) -> YarnScaling:
    for key, plain in (("yarn_ext_factor", (-1.0, 1.0)), ("yarn_log_multiplier", (0.0,))):
        if fields.number(f"rope.scaling.{key}", plain[0]) not in plain:
            raise ModelUnsupported(f"{fields.origin}: rotary scaling yarn with {key} is not supported")
    growth = 0.1 * logarithm(factor) + 1.0 if factor > 1 else 1.0
    further = fields.number("rope.scaling.attn_factor", 1.0) * fields.number("rope.scaling.yarn_attn_factor", 1.0)
    return YarnScaling(
        factor=factor,
        original_context=fields.integer("rope.scaling.original_context_length", fields.integer("context_length")),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=growth * further,
        truncate=truncates,
    )


def _eos_ids(top: ConfigFields) -> tuple[int, ...]:
    """Ids that end an answer: ends of text, of a turn, and of a message."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    return tuple(dict.fromkeys(i for key in keys for i in top.token_ids(f"tokenizer.ggml.{key}")))
