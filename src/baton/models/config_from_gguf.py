"""The metadata of a GGUF file becomes a ModelConfig.

Keys carry the architecture as a prefix ("llama.block_count"). What a file leaves out is read off its tensors: an output
head of its own or not, biases, and Llama 3's rotary scaling, which is stored as a tensor of divisors.
"""

from __future__ import annotations

import math

from baton.errors import ModelFileBroken, ModelUnsupported
from baton.models.config import (
    FrequencyDivisors,
    LinearScaling,
    ModelConfig,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)
from baton.models.config_fields import Fields
from baton.models.loaders.gguf_reader import GGUFFile
from baton.models.portable_math import logarithm
from baton.models.registry import architecture_of_gguf
from baton.models.support import refuse_mixture

ROPE_DIVISORS = "rope_freqs.weight"


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    origin = str(file.path)
    top = Fields(file.metadata, origin)
    name = top.text("general.architecture")
    model = architecture_of_gguf(name, origin)
    fields = Fields(file.metadata, origin, prefix=f"{name}.")
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden // max(heads, 1))
    traits = model.traits_from_gguf(fields, file.tensors)
    _refuse_what_we_do_not_run(fields, head_dim, windowed=bool(traits.layer_windows))
    return ModelConfig(
        architecture=model.name,
        vocab_size=_vocab_size(file),
        layers=fields.layer_count("block_count"),
        hidden_size=hidden,
        heads=heads,
        kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("feed_forward_length"),
        rope=RopeConfig(theta=fields.number("rope.freq_base", 10000.0), scaling=_scaling(fields, file)),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        tied_embeddings="output.weight" not in file.tensors,
        traits=traits,
        context_tokens_max=fields.integer("context_length"),
        bos_id=top.integer_or_none("tokenizer.ggml.bos_token_id", None),
        eos_ids=_eos_ids(top),
    )


def _refuse_what_we_do_not_run(fields: Fields, head_dim: int, windowed: bool) -> None:
    def refuse_unless(ok: bool, what: str) -> None:
        if not ok:
            raise ModelUnsupported(f"{fields.origin}: {what}")

    parts = Fields(fields.values, fields.origin).integer("split.count", 1)
    refuse_unless(parts <= 1, f"this is one of {parts} parts; merge them into one file with `llama-gguf-split --merge`")
    refuse_mixture(fields)
    rotary = fields.integer("rope.dimension_count", head_dim)
    refuse_unless(rotary == head_dim, f"rotary positions on {rotary} of {head_dim} dimensions are not supported")
    values = fields.integer("attention.value_length", head_dim)
    refuse_unless(values == head_dim, f"value heads of {values} beside key heads of {head_dim} are not supported")
    window = fields.integer("attention.sliding_window", 0)
    refuse_unless(windowed or window == 0, f"a sliding window ({window}) is not supported for {fields.prefix[:-1]}")
    usual = max(head_dim, 1) ** -0.5
    scale = fields.number("attention.scale", usual)
    refuse_unless(math.isclose(scale, usual, rel_tol=1e-5), f"attention scale {scale} is not supported")


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFileBroken(f"{file.path}: the tensor token_embd.weight is missing, so the vocabulary is unknown")
    return embedding.shape[0]


def _scaling(fields: Fields, file: GGUFFile) -> RopeScaling | None:
    if ROPE_DIVISORS in file.tensors:
        return FrequencyDivisors(divisors=file.floats(ROPE_DIVISORS))
    kind = fields.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = fields.number("rope.scaling.factor")
    if kind == "linear":
        return LinearScaling(factor=factor)
    if kind == "yarn":
        growth = 0.1 * logarithm(factor) + 1.0 if factor > 1 else 1.0
        return YarnScaling(
            factor=factor,
            original_context=fields.integer("rope.scaling.original_context_length", fields.integer("context_length")),
            attention_factor=growth * fields.number("rope.scaling.attn_factor", 1.0),
        )
    raise ModelUnsupported(
        f"{fields.origin}: rotary scaling {kind} is not supported; supported are none, linear, yarn and the tensor "
        f"{ROPE_DIVISORS}"
    )


def _eos_ids(top: Fields) -> tuple[int, ...]:
    """The end of text, of a turn, and of a message: any of them ends an answer."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    return tuple(dict.fromkeys(i for key in keys for i in top.token_ids(f"tokenizer.ggml.{key}")))
