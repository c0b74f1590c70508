"""Our names of a model's parameters, and the shape each must have.

Every loader translates its file's names into these (a matrix is [outputs, inputs]):

embed.weight                                 [vocab, hidden]
layers.N.attention_norm.{weight,bias}        [hidden], before the attention
layers.N.attention.{q,k,v,o}.{weight,bias}
layers.N.attention.{q,k}_norm.weight         [head_dim], or [heads * head_dim] across heads
layers.N.attention.sinks                     [heads]
layers.N.attention_post_norm.weight          [hidden], of the attention's output
layers.N.mlp_norm.{weight,bias}              [hidden]
layers.N.mlp.{gate,up,down}.{weight,bias}
layers.N.mlp_post_norm.weight                [hidden]
layers.N.mlp.router.{weight,bias}            [experts, hidden]; with experts in place of the MLP:
layers.N.mlp.router.correction               [experts]
layers.N.mlp.experts.E.{gate,up,down}.{weight,bias} layers.N.mlp.shared.{gate,up,down}.weight
layers.N.mlp.shared_gate.weight              [1, hidden]
final_norm.{weight,bias}                     [hidden]
lm_head.weight                               [vocab, hidden], absent if tied to the embedding
"""

from __future__ import annotations

from baton.models.config import Experts, ModelConfig
from baton.models.encoders.config import EncoderConfig
from baton.models.encoders.parameters import encoder_shapes

Shape = tuple[int, ...]

EMBED = "embed.weight"
FINAL_NORM = "final_norm.weight"
LM_HEAD = "lm_head.weight"


def expected_shapes(config: ModelConfig | EncoderConfig) -> dict[str, Shape]:
    """Name and shape of every parameter of a model with this config; of a rank's part, if the config is one."""
    if isinstance(config, EncoderConfig):
        return encoder_shapes(config)
    shapes: dict[str, Shape] = {EMBED: (config.vocab_size, config.hidden_size)}
    for layer in range(config.layers):
        shapes |= _layer_shapes(config, layer)
    shapes |= _norm_shapes(config, "final_norm")
    if not config.tied_embeddings:
        shapes[LM_HEAD] = (len(config.head_rows), config.hidden_size)
    return shapes


def layer_norms(config: ModelConfig) -> list[str]:
    """Names of a layer's norms, before and after attention and MLP."""
    before = ["attention_norm"] if config.traits.parallel else ["attention_norm", "mlp_norm"]
    after = ["attention_post_norm", "mlp_post_norm"]
    return {"before": before, "after": after, "both": before + after}[config.traits.norms]


def _norm_shapes(config: ModelConfig, name: str) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (config.hidden_size,)}
    if config.traits.norm_bias:
        shapes[f"{name}.bias"] = (config.hidden_size,)
    return shapes


def _layer_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    """Names and shapes of all parameters of one layer."""
    prefix, hidden, traits = f"layers.{layer}.", config.hidden_size, config.traits
    linears = {
        "attention.q": (config.q_size, hidden, traits.qkv_bias),
        "attention.k": (config.kv_size, hidden, traits.qkv_bias),
        "attention.v": (config.kv_size, hidden, traits.qkv_bias),
        "attention.o": (hidden, config.q_size, traits.output_bias),
    }
    experts = config.layer_experts(layer)
    if experts is None:
        linears |= _mlp_shapes("mlp.", hidden, config.intermediate_size, traits.mlp_bias)
    else:
        linears |= _expert_shapes(experts, config.own_experts, hidden)
    shapes: dict[str, Shape] = {}
    for norm in layer_norms(config):
        shapes |= _norm_shapes(config, f"{prefix}{norm}")
    if traits.qk_norm:
        across = traits.qk_norm_across_heads
        shapes[f"{prefix}attention.q_norm.weight"] = (config.q_size if across else config.head_dim,)
        shapes[f"{prefix}attention.k_norm.weight"] = (config.kv_size if across else config.head_dim,)
    if traits.sinks:
        shapes[f"{prefix}attention.sinks"] = (config.heads,)
    for name, (outputs, inputs, bias) in linears.items():
        shapes[f"{prefix}{name}.weight"] = (outputs, inputs)
        if bias:
            shapes[f"{prefix}{name}.bias"] = (outputs,)
    if experts is not None and experts.correction:
        shapes[f"{prefix}mlp.router.correction"] = (experts.count,)
    return shapes


def _expert_shapes(experts: Experts, own: range, hidden: int) -> dict[str, tuple[int, int, bool]]:
    linears = {"mlp.router": (experts.count, hidden, experts.bias)}
    for expert in own:
        linears |= _mlp_shapes(f"mlp.experts.{expert}.", hidden, experts.inner_size, experts.bias)
    if experts.shared_size:
        linears |= _mlp_shapes("mlp.shared.", hidden, experts.shared_size, False)
    if experts.shared_gate:
        linears["mlp.shared_gate"] = (1, hidden, False)
    return linears


def _mlp_shapes(prefix: str, hidden: int, inner: int, bias: bool) -> dict[str, tuple[int, int, bool]]:
    return {
        f"{prefix}gate": (inner, hidden, bias),
        f"{prefix}up": (inner, hidden, bias),
        f"{prefix}down": (hidden, inner, bias),
    }


def expert_names(layer: int, experts: range, *parts: str, kind: str = "weight") -> list[str]:
    """Parameter names of these parts (gate, up, down) of these experts of a layer, expert by expert."""
    return [f"layers.{layer}.mlp.experts.{expert}.{part}.{kind}" for expert in experts for part in parts]
