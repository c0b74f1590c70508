"""Our names of an encoder's parameters, and the shape each must have.

embed.weight                            [vocab, hidden]
positions.weight, types.weight          BERT's kind
embed_norm.{weight,bias}                [hidden]
layers.N.attention.{q,k,v}              BERT's kind; ModernBERT stores them as one, attention.qkv
layers.N.attention.o
layers.N.attention_norm, mlp_norm       after both; before them in ModernBERT, whose first layer has no attention_norm
layers.N.mlp.up                         ModernBERT: mlp.gate_up, the activated half first
layers.N.mlp.down
final_norm                              ModernBERT
head.dense, head.norm, head.out         of a model with classes
"""

from __future__ import annotations

from baton.models.encoders.config import EncoderConfig

Shape = tuple[int, ...]


def encoder_shapes(config: EncoderConfig) -> dict[str, Shape]:
    """Name and shape of every parameter of a model with this config."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {"embed.weight": (config.vocab_size, hidden)}
    if config.positions:
        shapes["positions.weight"] = (config.positions, hidden)
    if config.types:
        shapes["types.weight"] = (config.types, hidden)
    shapes |= _norm(config, "embed_norm")
    for layer in range(config.layers):
        shapes |= _layer(config, layer)
    if config.modern:
        shapes |= _norm(config, "final_norm")
    if config.head is not None:
        shapes |= _linear("head.dense", hidden, hidden, config.head.dense_bias)
        shapes |= _linear("head.out", len(config.head.labels), hidden, True)
        if config.head.norm:
            shapes |= _norm(config, "head.norm")
    return shapes


def product_names(config: EncoderConfig, layer: int, product: str) -> list[str]:
    """Parameters whose rows together are the matrix of this product ("attention.qkv" or "mlp.up") of a layer."""
    if config.modern:
        parts = ["attention.qkv"] if product == "attention.qkv" else ["mlp.gate_up"]
    else:
        parts = [f"attention.{part}" for part in "qkv"] if product == "attention.qkv" else ["mlp.up"]
    return [f"layers.{layer}.{part}" for part in parts]


def has_attention_norm(config: EncoderConfig, layer: int) -> bool:
    return not config.modern or layer > 0


def _layer(config: EncoderConfig, layer: int) -> dict[str, Shape]:
    prefix, hidden, inner = f"layers.{layer}.", config.hidden_size, config.intermediate_size
    shapes: dict[str, Shape] = {}
    for product, rows, bias in (
        ("attention.qkv", 3 * hidden, config.attention_bias),
        ("mlp.up", 2 * inner if config.modern else inner, config.mlp_bias),
    ):
        names = product_names(config, layer, product)
        for name in names:
            shapes |= _linear(name, rows // len(names), hidden, bias)
    shapes |= _linear(f"{prefix}attention.o", hidden, hidden, config.attention_bias)
    shapes |= _linear(f"{prefix}mlp.down", hidden, inner, config.mlp_bias)
    if has_attention_norm(config, layer):
        shapes |= _norm(config, f"{prefix}attention_norm")
    return shapes | _norm(config, f"{prefix}mlp_norm")


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (outputs, inputs)}
    return shapes | {f"{name}.bias": (outputs,)} if bias else shapes


def _norm(config: EncoderConfig, name: str) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (config.hidden_size,)}
    return shapes | {f"{name}.bias": (config.hidden_size,)} if config.norm_bias else shapes
