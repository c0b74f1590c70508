"""Our names of a model's parameters, and the shape each must have.

Every loader translates its file's names into these (a matrix is [outputs, inputs]):

embed.weight                                 [vocab, hidden]
layers.N.attention_norm.weight               [hidden]
layers.N.attention.{q,k,v,o}.{weight,bias}
layers.N.attention.{q,k}_norm.weight         [head_dim]
layers.N.mlp_norm.weight                     [hidden]
layers.N.mlp.{gate,up,down}.{weight,bias}
layers.N.mlp.router.weight                   [experts, hidden], in place of those where there are experts, with
layers.N.mlp.experts.E.{gate,up,down}.weight
final_norm.weight                            [hidden]
lm_head.weight                               [vocab, hidden], absent where the embedding is used again
"""

from __future__ import annotations

from baton.models.config import ModelConfig

Shape = tuple[int, ...]

EMBED = "embed.weight"
FINAL_NORM = "final_norm.weight"
LM_HEAD = "lm_head.weight"


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every parameter that a model of this config has: no more, no less."""
    shapes: dict[str, Shape] = {EMBED: (config.vocab_size, config.hidden_size)}
    for layer in range(config.layers):
        shapes.update(_layer_shapes(config, f"layers.{layer}."))
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tied_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: ModelConfig, prefix: str) -> dict[str, Shape]:
    hidden, inner, traits = config.hidden_size, config.intermediate_size, config.traits
    linears = {
        "attention.q": (config.q_size, hidden, traits.qkv_bias),
        "attention.k": (config.kv_size, hidden, traits.qkv_bias),
        "attention.v": (config.kv_size, hidden, traits.qkv_bias),
        "attention.o": (hidden, config.q_size, traits.output_bias),
    }
    experts = config.experts
    if experts is None:
        linears |= _mlp_shapes("mlp.", hidden, inner, traits.mlp_bias)
    else:
        linears["mlp.router"] = (experts.count, hidden, False)
        for expert in range(experts.count):
            linears |= _mlp_shapes(f"mlp.experts.{expert}.", hidden, experts.inner_size, False)
    shapes: dict[str, Shape] = {
        f"{prefix}attention_norm.weight": (hidden,),
        f"{prefix}mlp_norm.weight": (hidden,),
    }
    if traits.qk_norm:
        shapes[f"{prefix}attention.q_norm.weight"] = (config.head_dim,)
        shapes[f"{prefix}attention.k_norm.weight"] = (config.head_dim,)
    for name, (outputs, inputs, bias) in linears.items():
        shapes[f"{prefix}{name}.weight"] = (outputs, inputs)
        if bias:
            shapes[f"{prefix}{name}.bias"] = (outputs,)
    return shapes


def _mlp_shapes(prefix: str, hidden: int, inner: int, bias: bool) -> dict[str, tuple[int, int, bool]]:
    return {
        f"{prefix}gate": (inner, hidden, bias),
        f"{prefix}up": (inner, hidden, bias),
        f"{prefix}down": (hidden, inner, bias),
    }


def expert_names(layer: int, experts: int, *parts: str) -> list[str]:
    """Of these parts (gate, up, down) of all experts of a layer, expert by expert."""
    return [f"layers.{layer}.mlp.experts.{expert}.{part}.weight" for expert in range(experts) for part in parts]
